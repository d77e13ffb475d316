"""``FusedLAMB`` and ``FusedMixedPrecisionLamb`` against a plain reference (contract 5.5, 6.2)."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from harness.apex.optimizers import FusedLAMB, FusedMixedPrecisionLamb
from tests.apex.test_fused_optimizers import assert_equal, copied, give_gradients, params_of, train

pytestmark = pytest.mark.contract("5.5.FusedLAMB", "5.5.FusedMixedPrecisionLamb", "6.2.TestFusedLAMB")
BOTH = pytest.mark.parametrize("kind", [FusedLAMB, FusedMixedPrecisionLamb])
DEFAULTS = {
    **{"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01},
    **{"adam_w_mode": True, "grad_averaging": True, "max_grad_norm": 1.0, "use_nvlamb": False},
}


def norm(values):
    return math.sqrt(sum(value * value for value in values))


def lamb(weights, steps, **options):
    """LAMB element by element; ``weights`` and each of ``steps`` (gradients) are lists of lists of numbers."""
    o = {**DEFAULTS, **options}
    beta1, beta2 = o["betas"]
    m, v = ([[0.0] * len(w) for w in weights] for _ in range(2))
    for count, grads in enumerate(steps, 1):
        clip = max(1.0, norm([g for gs in grads for g in gs]) / o["max_grad_norm"]) if o["max_grad_norm"] else 1.0
        bias1, bias2 = (1 - beta1**count, 1 - beta2**count) if o["bias_correction"] else (1.0, 1.0)
        for k, w in enumerate(weights):
            update = []
            for i, g in enumerate(grads[k]):
                g = g / clip + (0.0 if o["adam_w_mode"] else o["weight_decay"] * w[i])
                m[k][i] = beta1 * m[k][i] + (1 - beta1 if o["grad_averaging"] else 1.0) * g
                v[k][i] = beta2 * v[k][i] + (1 - beta2) * g * g
                u = m[k][i] / bias1 / (math.sqrt(v[k][i] / bias2) + o["eps"])
                update.append(u + (o["weight_decay"] * w[i] if o["adam_w_mode"] else 0.0))
            trusted = (o["weight_decay"] != 0 or o["use_nvlamb"]) and norm(w) > 0 and norm(update) > 0
            ratio = norm(w) / norm(update) if trusted else 1.0
            weights[k] = [a - o["lr"] * ratio * b for a, b in zip(w, update, strict=True)]
    return weights


OPTIONS = [
    {},
    {"lr": 0.1, "betas": (0.6, 0.9), "weight_decay": 0.3},
    {"lr": 0.1, "weight_decay": 0.3, "adam_w_mode": False},
    {"lr": 0.1, "weight_decay": 0.0},
    {"lr": 0.1, "weight_decay": 0.0, "use_nvlamb": True},
    {"lr": 0.1, "bias_correction": False, "eps": 0.1},
    {"lr": 0.1, "grad_averaging": False, "max_grad_norm": 100.0},
    {"lr": 0.1, "max_grad_norm": 0.5},
    {"lr": 0.1, "max_grad_norm": None},
    {"lr": 0.1, "max_grad_norm": 0},
]


@BOTH
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_the_reference(kind, options, dtype, tolerance):
    params = params_of(dtype)
    with torch.no_grad():
        params[1].zero_()  # no trust ratio in its first step
    weights, steps = [p.detach().flatten().tolist() for p in params], []
    optimizer = kind([{"params": params[:2]}, {"params": params[2:]}], **options)
    for step in range(5):
        give_gradients(params, step, scale=10.0**-step)  # clipped at first, not later
        steps.append([p.grad.flatten().tolist() for p in params])
        optimizer.step()
    if kind is FusedMixedPrecisionLamb:
        tolerance = max(tolerance, 1e-6)  # lr is a float32 tensor
    for param, expected in zip(params, lamb(weights, steps, **options), strict=True):
        found = param.detach().flatten()
        torch.testing.assert_close(found, torch.tensor(expected, dtype=dtype), rtol=tolerance, atol=tolerance)


def test_the_norm_is_over_all_groups_and_the_constructors_bound_counts():
    a, b = (torch.tensor([1.0], requires_grad=True) for _ in range(2))
    optimizer = FusedLAMB([{"params": [a], "max_grad_norm": 100.0}, {"params": [b]}], max_grad_norm=1.0)
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step()
    assert optimizer.state[a]["exp_avg"].item() == pytest.approx(0.1 * 3 / 5)
    assert optimizer.state[b]["exp_avg"].item() == pytest.approx(0.1 * 4 / 5)


@BOTH
def test_gradients_are_not_touched(kind):
    params = params_of(torch.float32)
    optimizer = kind(params)
    give_gradients(params, 0, scale=10.0)
    before = [p.grad.clone() for p in params]
    optimizer.step()
    assert_equal([p.grad for p in params], before)


def test_norms_of_float16_gradients_do_not_overflow():
    w = torch.ones(10_000, dtype=torch.float16, requires_grad=True)
    w.grad = torch.full_like(w, 1000.0)  # the norm is 100000
    optimizer = FusedLAMB([w], lr=0.1)
    optimizer.step()
    assert optimizer.state[w]["exp_avg"][0].item() == pytest.approx(0.1 * 1000 / 100_000, rel=1e-4)


def test_positional_order_is_apexs():
    params = params_of(torch.float32)
    keys = ("bias_correction", "betas", "eps", "weight_decay", "grad_averaging", "max_grad_norm")
    optimizer = FusedLAMB(params, 0.5, False, (0.1, 0.2), 0.3, 0.4, False, False, False, False, 0.6, True)
    group = optimizer.param_groups[0]
    assert [group["lr"], *(group[k] for k in keys)] == [0.5, False, (0.1, 0.2), 0.3, 0.4, False, 0.6]
    assert (optimizer.adam_w_mode, optimizer.set_grad_none, optimizer.use_nvlamb) == (False, False, True)

    optimizer = FusedMixedPrecisionLamb(
        params, 0.5, 7, False, (0.1, 0.2), 0.3, 0.4, False, False, False, 0.6, True, torch.bfloat16
    )
    group = optimizer.param_groups[0]
    assert [group["lr"].item(), *(group[k] for k in keys)] == [0.5, False, (0.1, 0.2), 0.3, 0.4, False, 0.6]
    assert (group["step"].item(), optimizer.adam_w_mode, optimizer.use_nvlamb) == (7, False, True)
    assert optimizer.reduced_precision_dtype is torch.bfloat16


def test_starting_at_a_later_step_corrects_the_bias_of_that_step():
    params = params_of(torch.float32)
    before = copied(params)
    optimizer = FusedMixedPrecisionLamb(params, 0.1, step=50, weight_decay=0.0)
    train(optimizer, params, 1)
    assert optimizer.param_groups[0]["step"].item() == 51
    expected = 0.1 * (1 - 0.9) / (1 - 0.9**51) * math.sqrt((1 - 0.999**51) / (1 - 0.999))
    assert (before[0] - params[0]).abs().max().item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_of_the_named_dtype_only(dtype):
    params = params_of(torch.float32, torch.float16, torch.bfloat16)
    optimizer = FusedMixedPrecisionLamb(params, lr=1e-6, reduced_precision_dtype=dtype)
    train(optimizer, params, 3)
    for param, state in optimizer.state.items():
        assert ("master_param" in state) is (param.dtype is dtype)
        if param.dtype is dtype:
            assert not torch.equal(state["master_param"], param.float())  # more than the parameter can hold
            assert torch.equal(state["master_param"].to(dtype), param)


def test_a_half_model_under_grad_scaler_with_masters():
    params = params_of(torch.float16)
    wide = [p.detach().float().requires_grad_() for p in params]
    optimizer = FusedMixedPrecisionLamb(params, lr=0.01, reduced_precision_dtype=torch.float16)
    reference = FusedLAMB(wide, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.ones(()))
    for step in range(4):
        give_gradients(params, step, scale=16.0)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float() / 16.0
        scaler.step(optimizer)
        scaler.update()
        reference.step()
    for p, w in zip(params, wide, strict=True):
        torch.testing.assert_close(optimizer.state[p]["master_param"], w, rtol=1e-6, atol=1e-7)


def test_takes_a_state_dict_of_fused_lamb():
    params = params_of(torch.float32)
    optimizer = FusedLAMB(params, lr=0.01)
    train(optimizer, params, 2)
    others = copied(params)
    other = FusedMixedPrecisionLamb(others)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["step"].item() == 2
    for some, their in ((params, optimizer), (others, other)):
        train(their, some, 2, start=2)
    for a, b in zip(others, params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_grad_scaler_is_not_passed_to_step():
    optimizer = FusedMixedPrecisionLamb(params_of(torch.float32))
    with pytest.raises(RuntimeError, match=r"given grad_scaler; .*scaler.step\(optimizer\)"):
        optimizer.step(grad_scaler=torch.amp.GradScaler("cpu"))
    assert optimizer.step(None, grad_scaler=None) is None
