"""FP16_Optimizer of fp16_utils: steps, overflows, gradients, closures and parameters (contract 1.1, 6.1)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.apex import amp
from harness.apex.fp16_utils import FP16_Optimizer
from tests.apex.fp16_training import HALF, HIGH, INF, MAKERS, build, by_hand, loss_of, make_model, masters_of, train
from tests.apex.shared import copies, same

pytestmark = pytest.mark.contract("1.1")


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_training_equals_the_recipe_by_hand(dtype, maker, dynamic, clip):
    arguments = {"dynamic_loss_args": {"init_scale": 1024.0}} if dynamic else {"static_loss_scale": 1024.0}
    model, optimizer = build(maker, dtype, dynamic_loss_scale=dynamic, **arguments)
    twin = make_model(dtype)
    losses = train(model, optimizer, range(8), clip)
    expected, masters = by_hand(twin, MAKERS[maker], range(8), 1024.0, clip)
    assert losses == expected
    assert losses[-1] != losses[0]
    assert same(masters_of(optimizer), masters)
    assert same(model.parameters(), twin.parameters())


def test_masters_replace_half_parameters_in_the_groups():
    model = make_model()
    inside = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 1.0}], lr=0.1)
    optimizer = FP16_Optimizer(inside)
    assert optimizer.optimizer is inside
    assert optimizer.param_groups is inside.param_groups
    assert optimizer.state is inside.state
    assert optimizer.fp16_groups == [[model[0].weight, model[0].bias], []]
    assert inside.param_groups[1]["params"][0] is model[1].weight, "float32 is its own master"
    assert optimizer.fp32_from_fp32_groups == [[], [model[1].weight, model[1].bias]]
    assert same(optimizer.fp32_from_fp16_groups[0], [p.float() for p in optimizer.fp16_groups[0]])
    assert isinstance(optimizer, torch.optim.Optimizer)


# Overflow


def test_overflow_skips_the_step_and_halves_the_scale(caplog):
    model, optimizer = build("adam", dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**24})
    assert optimizer.loss_scale == 2.0**24
    seen = []
    for _ in range(30):
        params = copies((*model.parameters(), *masters_of(optimizer)))
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, 0))
        before, overflow = optimizer.loss_scale, optimizer.overflow
        if overflow:
            assert optimizer.clip_master_grads(1.0) == -1
            assert optimizer.inspect_master_grad_data() is None
        assert optimizer.step() is None
        assert same(params, (*model.parameters(), *masters_of(optimizer))) == overflow
        assert optimizer.loss_scale == (before / 2 if overflow else before)
        seen.append(overflow)
    assert seen[0]
    assert not seen[-1]
    assert seen == sorted(seen, reverse=True), "it finds a scale that fits and keeps it"
    assert f"loss scale {2.0**24:g}, now {2.0**23:g}" in caplog.text


def test_dynamic_scale_has_the_constants_of_amp():
    _, optimizer = build("sgd", dynamic_loss_scale=True)
    scaler = optimizer.loss_scaler  # Apex's FP16_Optimizer took the scaler of amp from 2019 on
    assert (scaler.cur_scale, scaler.scale_window, scaler.max_loss_scale) == (2.0**16, 2000, 2.0**24)


def test_nan_in_a_float32_parameter_skips_the_step(caplog):
    arguments = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 8.0}, "verbose": False}
    model, optimizer = build(**arguments)
    before = copies((*model.parameters(), *masters_of(optimizer)))
    optimizer.backward(model[1].weight.sum() * float("nan"))
    assert optimizer.overflow
    optimizer.step()
    assert optimizer.loss_scale == 4.0
    assert caplog.text == "", "it is not verbose"
    assert same(before, (*model.parameters(), *masters_of(optimizer)))
    assert not optimizer.state


def test_scale_grows_by_steps_and_may_be_set():
    model, optimizer = build(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0, "scale_window": 2})
    train(model, optimizer, range(4))
    assert optimizer.loss_scale == 32.0
    optimizer.loss_scale = 4.0
    assert optimizer.loss_scaler.cur_scale == 4.0


# Gradients


def grads(optimizer) -> list[torch.Tensor]:
    return [g.clone() for group in optimizer.inspect_master_grad_data() for g in group]


@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_backward_calls_add_up_in_every_precision(scale):
    """Apex divided the gradients of float32 parameters by the scale once for every backward."""
    model, optimizer = build(static_loss_scale=scale)
    model.eval()
    singles = []
    for step in (0, 1):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step))
        singles.append(grads(optimizer))
    expected = [one + other for one, other in zip(*singles, strict=True)]
    for updates in ([True, True], [False, True], [False, False]):
        optimizer.zero_grad()
        for step, update in enumerate(updates):
            optimizer.backward(loss_of(model, step), update_master_grads=update)
        if not updates[-1]:
            optimizer.update_master_grads()
        optimizer.update_master_grads()  # again: nothing is unscaled twice
        for one, other in zip(grads(optimizer), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-4)


def test_masters_hold_unscaled_gradients_after_backward():
    model, optimizer = build(static_loss_scale=64.0)
    optimizer.backward(loss_of(model, 0))
    assert torch.equal(grads(optimizer)[0], model[0].weight.grad.float() / 64)
    assert optimizer.clip_master_grads(1e-3) > 1e-3
    assert torch.stack([g.norm() for g in grads(optimizer)]).norm().item() == pytest.approx(1e-3, rel=1e-3)
    assert optimizer.clip_master_grads(1.0, norm_type=INF) == max(float(g.abs().max()) for g in grads(optimizer))


@pytest.mark.parametrize("argument", ["set_grads_to_None", "set_to_none"])
def test_zero_grad(argument):
    model, optimizer = build()
    everything = [*model.parameters(), *masters_of(optimizer)]
    optimizer.backward(loss_of(model, 0))
    assert any(p.grad.any() for p in everything)
    optimizer.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in everything)
    optimizer.backward(loss_of(model, 0))
    optimizer.zero_grad(**{argument: True})
    assert all(p.grad is None for p in everything)


def test_parameters_without_gradient_do_not_move():
    model, optimizer = build(lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.5))
    train(model, optimizer, [0])
    optimizer.zero_grad(set_to_none=True)
    optimizer.backward(model[3].weight.float().sum())
    before = model[0].weight.clone()
    optimizer.step()
    assert optimizer.inspect_master_grad_data()[0][0] is None
    assert torch.equal(model[0].weight, before)


def test_sparse_gradients():
    table = nn.Embedding(5, 2, sparse=True).half()
    optimizer = FP16_Optimizer(torch.optim.SGD(table.parameters(), lr=1.0), static_loss_scale=8.0)
    expected = table.weight.detach().float()
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        optimizer.backward(table(torch.tensor([1, 1, 3])).sum())
        optimizer.step()
    expected[1] -= 4
    expected[3] -= 2
    assert torch.equal(optimizer.fp32_from_fp16_groups[0][0], expected)
    assert torch.equal(table.weight, expected.half())


# Closures


@pytest.mark.parametrize("maker", MAKERS)
def test_step_with_a_closure_equals_the_plain_step(maker):
    model, optimizer = build(maker, static_loss_scale=128.0)
    twin, plain = build(maker, static_loss_scale=128.0)
    for step in range(4):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            optimizer.backward(loss)
            return loss

        assert [optimizer.step(closure).item()] == train(twin, plain, [step])
    assert same(model.parameters(), twin.parameters())
    assert optimizer.first_closure_call_this_step


def test_closure_is_called_again_on_moved_weights_and_at_smaller_scales():
    model, optimizer = build(
        lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=4),
        dynamic_loss_scale=True,
        dynamic_loss_args=HIGH,
        verbose=False,
    )
    weights, kept = [], []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        optimizer.backward(loss)
        weights.append(model[0].weight.detach().clone())
        if not optimizer.overflow:
            kept.append(loss.item())
            assert same(optimizer.fp16_groups[0], [m.half() for m in optimizer.fp32_from_fp16_groups[0]])
        return loss

    for _ in range(3):
        assert optimizer.step(closure).isfinite()
    assert len(weights) > len(kept) > 3, "it is called again after overflows"
    assert not torch.equal(weights[0], weights[-1])
    assert kept[-1] < kept[0] / 2
    assert 1.0 <= optimizer.loss_scale < 2.0**32


def test_closure_that_is_never_finite_raises():
    model, optimizer = build(dynamic_loss_scale=True, dynamic_loss_args=HIGH, verbose=False)
    calls = []

    def closure():
        optimizer.zero_grad()
        calls.append(1)
        optimizer.backward(loss_of(model, 0) * float("nan"))

    with pytest.raises(FloatingPointError, match="every loss scale down to 1:"):
        optimizer.step(closure)
    assert len(calls) == 33
    assert optimizer.first_closure_call_this_step


# Which parameters


def test_groups_added_later_get_masters():
    model = make_model()
    optimizer = FP16_Optimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), static_loss_scale=16.0)
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.2})
    assert [p.dtype for p in optimizer.param_groups[1]["params"]] == [torch.float32] * 2
    before = model[3].weight.clone()
    optimizer.backward(loss_of(model, 0))
    gradient = optimizer.inspect_master_grad_data()[1][0].clone()
    optimizer.step()
    assert torch.equal(model[3].weight, (before.float() - 0.2 * gradient).half())
    with pytest.raises(TypeError, match=r"float64 parameter of shape \(2,\)"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]})
    assert len(optimizer.param_groups) == 2


def test_other_dtypes_are_refused_before_anything_changes():
    half, double = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2).double())
    inside = torch.optim.SGD([half, double], lr=0.1)
    with pytest.raises(TypeError, match=r"Cast it with \.float\(\)"):
        FP16_Optimizer(inside)
    assert inside.param_groups[0]["params"][0] is half


def test_unfreezing_a_parameter_without_master_is_refused():
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = FP16_Optimizer(MAKERS["sgd"](model.parameters()))
    assert masters_of(optimizer)[0] is model[0].weight
    train(model, optimizer, range(2))
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="has no master"):
        train(model, optimizer, [2])


def test_what_cannot_be_wrapped_is_refused():
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        FP16_Optimizer([1])
    with pytest.raises(RuntimeError, match="already has masters"):
        FP16_Optimizer(build()[1])
    net = nn.Linear(2, 2)
    _, optimizer = amp.initialize(net, MAKERS["sgd"](net.parameters()), opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="from amp"):
        FP16_Optimizer(optimizer)


@pytest.mark.contract("1.2.types")
def test_amp_refuses_it():
    model = nn.Linear(2, 2)
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for form in (optimizer, [optimizer]):
        with pytest.raises(RuntimeError, match="FP16_Optimizer"):
            amp.initialize(model, form, opt_level="O2", verbosity=0)
    assert model.weight.dtype == torch.float32


def test_weights_loaded_late_are_kept():
    """In Apex the first step restored the weights from before."""
    model, optimizer = build(lambda params: torch.optim.SGD(params, lr=0.0))
    for use in ("state_dict", "step"):
        loaded = {name: value + 1 for name, value in model.state_dict().items()}
        model.load_state_dict(loaded)
        if use == "state_dict":
            assert torch.equal(optimizer.state_dict()["fp32_from_fp16"][0][0], loaded["0.weight"].float())
        train(model, optimizer, [0])
        assert torch.equal(model[0].weight, loaded["0.weight"])


def test_schedulers_and_step_hooks_work():
    model, optimizer = build(lambda params: torch.optim.SGD(params, lr=1.0))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(model, optimizer, [0])
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.5
    assert "lr: 0.5" in repr(optimizer)
    assert calls == [1]
