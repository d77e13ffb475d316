"""``FusedAdagrad`` against torch's Adagrad and a plain reference (contract 5.5, 6.2)."""

from __future__ import annotations

import pytest
import torch

from harness.apex.optimizers import FusedAdagrad
from tests.apex.test_fused_optimizers import copied, params_of, train

pytestmark = pytest.mark.contract("5.5.FusedAdagrad", "6.2.TestFusedAdagrad")


@pytest.mark.parametrize("options", [{}, {"lr": 0.1, "eps": 0.01, "weight_decay": 0.3}])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_equals_torch(options, dtype, tolerance):
    params = params_of(dtype)
    others = copied(params)
    train(FusedAdagrad(params, **options), params, 7)
    train(torch.optim.Adagrad(others, **options), others, 7)
    for a, b in zip(params, others, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_decoupled_weight_decay():
    w, expected, total = torch.tensor([2.0], requires_grad=True), 2.0, 0.0
    optimizer = FusedAdagrad([w], lr=0.1, eps=0.5, weight_decay=0.2, adagrad_w_mode=True)
    for g in (1.0, -3.0, 2.0):
        w.grad = torch.tensor([g])
        optimizer.step()
        total += g * g
        expected -= 0.1 * (g / (total**0.5 + 0.5) + 0.2 * expected)
    assert w.item() == pytest.approx(expected, rel=1e-6)
    assert w.grad.item() == 2.0


def test_positional_order_and_state_are_apexs():
    params = params_of(torch.float16)
    optimizer = FusedAdagrad(params, 0.5, 0.25, 0.75, False, True)
    train(optimizer, params, 1)
    group = optimizer.state_dict()["param_groups"][0]
    assert {k: group[k] for k in group if k != "params"} == {"lr": 0.5, "eps": 0.25, "weight_decay": 0.75}
    assert (optimizer.set_grad_none, optimizer.adagrad_w_mode) == (False, True)
    assert all(set(state) == {"sum"} for state in optimizer.state_dict()["state"].values())
