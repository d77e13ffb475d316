"""``FusedNovoGrad`` against a plain reference; its running norms in the group (contract 5.5, 6.2)."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from harness.apex.optimizers import FusedNovoGrad
from tests.apex.test_fused_optimizers import assert_equal, copied, give_gradients, params_of, train

pytestmark = pytest.mark.contract("5.5.FusedNovoGrad", "6.2.TestFusedNovoGrad")
DEFAULTS = {
    **{"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    **{"reg_inside_moment": False, "grad_averaging": True, "norm_type": 2, "init_zero": False},
}


def novograd(w, steps, **options):
    """NovoGrad of one tensor, element by element: ``w`` and each of ``steps`` (gradients) are lists of numbers."""
    o = {**DEFAULTS, **options}
    beta1, beta2 = o["betas"]
    m, v = [0.0] * len(w), 0.0
    for count, grads in enumerate(steps, 1):
        if o["norm_type"] == 2:
            size = sum(g * g for g in grads)  # v is the running square here
        else:
            size = max(abs(g) for g in grads)
        v = size if count == 1 and not o["init_zero"] else beta2 * v + (1 - beta2) * size
        bias1, bias2 = (1 - beta1**count, 1 - beta2**count) if o["bias_correction"] else (1.0, 1.0)
        denominator = (math.sqrt(v) if o["norm_type"] == 2 else v) / math.sqrt(bias2) + o["eps"]
        for i, g in enumerate(grads):
            if o["reg_inside_moment"]:
                g = g / denominator + o["weight_decay"] * w[i]
            m[i] = beta1 * m[i] + (1 - beta1 if o["grad_averaging"] else 1.0) * g
            update = m[i] / bias1
            if not o["reg_inside_moment"]:
                update = update / denominator + o["weight_decay"] * w[i]
            w[i] -= o["lr"] * update
    return w


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "weight_decay": 0.3, "betas": (0.95, 0.5)},
        {"lr": 0.1, "weight_decay": 0.3, "reg_inside_moment": True, "betas": (0.95, 0.5)},
        {"lr": 0.1, "norm_type": 0, "betas": (0.95, 0.5)},
        {"lr": 0.1, "init_zero": True, "betas": (0.95, 0.5)},
        {"lr": 0.1, "init_zero": True, "norm_type": 0, "reg_inside_moment": True},
        {"lr": 0.1, "bias_correction": False, "grad_averaging": False, "eps": 0.1},
        {"lr": 0.1, "grad_averaging": False, "reg_inside_moment": True, "betas": (0.0, 0.0)},
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_equals_the_reference(options, dtype, tolerance):
    params = params_of(dtype)
    weights, steps = [p.detach().flatten().tolist() for p in params], []
    optimizer = FusedNovoGrad(params, **options)
    for step in range(5):
        give_gradients(params, step)
        steps.append([p.grad.flatten().tolist() for p in params])
        optimizer.step()
    for k, param in enumerate(params):
        expected = torch.tensor(novograd(weights[k], [grads[k] for grads in steps], **options), dtype=dtype)
        torch.testing.assert_close(param.detach().flatten(), expected, rtol=tolerance, atol=tolerance)


def test_positional_order_is_apexs():
    params = params_of(torch.float32)
    optimizer = FusedNovoGrad(params, 0.5, False, (0.1, 0.2), 0.3, 0.4, False, True, False, 0, True, False)
    group = optimizer.param_groups[0]
    keys = ("lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging", "norm_type", "init_zero")
    assert [group[k] for k in keys] == [0.5, False, (0.1, 0.2), 0.3, 0.4, False, 0, True]
    assert (optimizer.reg_inside_moment, optimizer.set_grad_none) == (True, False)


def test_running_norms_are_where_apex_kept_them():
    half, single = torch.ones(2, dtype=torch.float16), torch.ones(2)
    brain = torch.ones(1, dtype=torch.bfloat16)
    params = [p.requires_grad_() for p in (single, half, single.clone(), brain)]
    optimizer = FusedNovoGrad(params)
    for param, size in zip(params, (1.0, 2.0, 3.0, 4.0), strict=True):
        param.grad = torch.zeros_like(param)
        param.grad[0] = size
    optimizer.step()
    norms = optimizer.state_dict()["param_groups"][0]["exp_avg_sq"]
    assert [vector.tolist() for vector in norms] == [[2.0, 4.0], [1.0, 3.0]]
    assert [vector.dtype for vector in norms] == [torch.float32] * 2
    assert set(optimizer.state[half]) == {"exp_avg"}


def test_takes_a_state_dict_as_apex_wrote_it():
    params = [torch.ones(2, requires_grad=True), torch.ones(3, dtype=torch.float16, requires_grad=True)]
    optimizer = FusedNovoGrad(params, betas=(0.9, 0.75), bias_correction=False)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(step=5, exp_avg_sq=[torch.tensor([3.0]), torch.tensor([0.0])])
    saved["state"] = {i: {"exp_avg": torch.full_like(p, 1e-6).detach()} for i, p in enumerate(params)}
    optimizer.load_state_dict(saved)
    give_gradients(params, 0)
    params[1].grad = torch.zeros_like(params[1])
    params[0].grad = torch.tensor([0.0, 2.0])
    optimizer.step()
    group = optimizer.param_groups[0]
    assert group["step"] == 6
    assert group["exp_avg_sq"][0].item() == pytest.approx(math.sqrt(0.75 * 9.0))
    assert group["exp_avg_sq"][1].item() == pytest.approx(math.sqrt(0.25 * 4.0))


def test_norms_saved_in_one_dtype_fit_parameters_of_several():
    params = params_of(torch.float32)
    optimizer = FusedNovoGrad(params)
    train(optimizer, params, 2)
    mixed = [p.detach().to(torch.float16 if i % 2 else torch.float32).requires_grad_() for i, p in enumerate(params)]
    other = FusedNovoGrad(mixed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    norms = optimizer.param_groups[0]["exp_avg_sq"][1]
    assert_equal(other.param_groups[0]["exp_avg_sq"], [norms[1::2], norms[::2]])


def test_norms_that_cannot_be_assigned_are_refused():
    params = params_of(torch.float32, torch.float16)
    optimizer = FusedNovoGrad(params)
    train(optimizer, params, 1)
    others = [p.detach().float().requires_grad_() for p in params]
    with pytest.raises(ValueError, match=r"holds \[4, 4\] running norms; .* are \[0, 8\]"):
        FusedNovoGrad(others).load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_norms_of_parameters_without_gradient_stand_still():
    params = params_of(torch.float32)
    optimizer = FusedNovoGrad(params, init_zero=True)
    train(optimizer, params, 1)
    before = copied(optimizer.param_groups[0]["exp_avg_sq"])[1]
    give_gradients(params, 1)
    params[2].grad = None
    optimizer.step()
    after = optimizer.param_groups[0]["exp_avg_sq"][1]
    assert (after == before).tolist() == [False, False, True, False]
