"""``FusedSGD`` against torch's SGD, alone and under amp with overflows (contract 5.5, 6.1, 6.2)."""

from __future__ import annotations

import itertools

import pytest
import torch

from harness.apex import amp
from harness.apex.optimizers import FusedSGD
from tests.apex.test_fused_optimizers import assert_equal, copied, give_gradients, params_of, train
from tests.apex.test_scale_loss import WIRINGS, Product, inputs, reference, zero

pytestmark = pytest.mark.contract("5.5.FusedSGD")


@pytest.mark.contract("6.2.TestFusedSGD")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.3},
        {"momentum": 0.9, "weight_decay": 0.3},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.3},
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_equals_torch(options, dtype, tolerance):
    params = params_of(dtype)
    others = copied(params)
    optimizers = FusedSGD(params, lr=0.1, **options), torch.optim.SGD(others, lr=0.1, **options)
    for step in range(7):
        for some, optimizer in zip((params, others), optimizers, strict=True):
            give_gradients(some, step)
            if step < 2:
                some[1].grad = None  # its first momentum comes later than that of the others
            optimizer.step()
    for a, b in zip(params, others, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("nesterov", [False, True])
def test_decay_after_momentum(nesterov):
    w = torch.tensor([2.0], requires_grad=True)
    optimizer = FusedSGD([w], lr=0.1, momentum=0.5, weight_decay=0.2, nesterov=nesterov, wd_after_momentum=True)
    expected, momentum = 2.0, None
    for step in range(4):
        g = 1.0 + step
        w.grad = torch.tensor([g])
        optimizer.step()
        momentum = g if momentum is None else 0.5 * momentum + g
        direction = g + 0.5 * momentum if nesterov else momentum
        expected -= 0.1 * (direction + 0.2 * expected)
        assert optimizer.state[w]["momentum_buffer"].item() == momentum
    assert w.item() == pytest.approx(expected, rel=1e-6)


def test_positional_order_and_attributes_are_apexs():
    optimizer = FusedSGD(params_of(torch.float32), 0.5, 0.25, 0.0, 0.75, True, True, False, True)
    group = optimizer.param_groups[0]
    found = [group[k] for k in ("lr", "momentum", "dampening", "weight_decay", "nesterov")]
    assert found == [0.5, 0.25, 0.0, 0.75, True]
    assert (optimizer.wd_after_momentum, optimizer.materialize_master_grads, optimizer.set_grad_none) == (
        True,
        False,
        True,
    )
    assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)


def test_a_rate_per_group_is_enough():
    params = params_of(torch.float32)
    before = copied(params)
    optimizer = FusedSGD([{"params": params[:2], "lr": 0.5}, {"params": params[2:], "lr": 0.25}])
    train(optimizer, params, 1)
    for param, old, lr in zip(params, before, (0.5, 0.5, 0.25, 0.25), strict=True):
        torch.testing.assert_close(param, old - lr * param.grad)


def test_takes_a_state_dict_of_torchs_sgd_whose_momentum_is_none():
    params = params_of(torch.float32)
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9)
    state = {i: {"momentum_buffer": None} for i in range(len(params))}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    train(optimizer, params, 1)
    assert_equal([optimizer.state[p]["momentum_buffer"] for p in params], [p.grad for p in params])


@pytest.mark.contract("6.1.test_fused_sgd")
@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("materialize", [True, False])
def test_exactly_the_affected_optimizers_skip(wiring, level, materialize):
    """Models x losses x optimizers, an inf somewhere, against plain SGD with the right steps left out."""
    count, losses, owners = WIRINGS[wiring]
    where = [None, *itertools.product(range(2), range(2), range(2), ("weight", "norm"))]
    for (num_losses, style), bad in itertools.product([(1, "optimizer"), (2, "model")], where):
        amp.reset()
        models = [Product() for _ in range(count)]
        optimizers = [
            FusedSGD(
                [p for m in own for p in (models[m].weight, models[m].norm.weight)],
                lr=0.25,
                momentum=0.5,
                materialize_master_grads=materialize,
            )
            for own in owners
        ]
        amp.initialize(models, optimizers, opt_level=level, loss_scale="dynamic", num_losses=num_losses, verbosity=0)
        for i, scaler in enumerate(amp._amp_state.loss_scalers):
            scaler._loss_scale = (4.0, 16.0)[i]
        skipped = set()
        for step, (k, (reached, given)) in itertools.product(range(3), enumerate(losses)):
            total = sum(models[m](inputs(step, k)[i % 2]) for i, m in enumerate(reached))
            with amp.scale_loss(total, [optimizers[o] for o in given], loss_id=k % num_losses) as loss:
                loss.backward()
                if bad is not None and bad[:2] == (step, k):
                    victim = models[reached[bad[2] % len(reached)]]
                    parameter = victim.weight if bad[3] == "weight" else victim.norm.weight
                    parameter.grad[0] = float("inf")
                    skipped |= {(step, o) for o in given}
            if k == len(losses) - 1:
                for o, optimizer in enumerate(optimizers):
                    assert optimizer._amp_stash.already_patched == ((step, o) in skipped)
                    optimizer.step()
                zero(style, models, optimizers)
        found = [p for m in models for p in (m.weight, m.norm.weight)]
        for a, b in zip(reference(wiring, skipped), found, strict=True):
            torch.testing.assert_close(b.detach().float(), a.detach(), rtol=0, atol=0 if level != "O3" else 0.02)
        if level == "O2":
            for optimizer in optimizers:
                stash = optimizer._amp_stash
                pairs = zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True)
                assert all(torch.equal(model, master.half()) for model, master in pairs)
