"""Fused optimizers in many configurations, and helpers to train and compare them."""

from __future__ import annotations

import pytest
import torch

from harness.apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD

HALF = torch.float16
BFLOAT = torch.bfloat16
CASES = {
    "adam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1),
    "adam, L2": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1, adam_w_mode=False),
    "adam, capturable": lambda params: FusedAdam(params, lr=0.01, capturable=True),
    "adam, masters": lambda params: FusedAdam(params, lr=0.01, capturable=True, master_weights=True),
    "sgd": lambda params: FusedSGD(params, lr=0.01, momentum=0.9, weight_decay=0.1),
    "sgd, decay after": lambda params: FusedSGD(params, 0.01, 0.9, weight_decay=0.1, wd_after_momentum=True),
    "lamb": lambda params: FusedLAMB(params, lr=0.01),
    "mixed lamb": lambda params: FusedMixedPrecisionLamb(params, lr=0.01, reduced_precision_dtype=HALF),
    "mixed lamb, sums": lambda params: FusedMixedPrecisionLamb(params, lr=0.01, grad_averaging=False, max_grad_norm=0),
    "novograd": lambda params: FusedNovoGrad(params, lr=0.01, weight_decay=0.1),
    "novograd, inside": lambda params: FusedNovoGrad(params, 0.01, weight_decay=0.1, reg_inside_moment=True),
    "adagrad": lambda params: FusedAdagrad(params, lr=0.01, weight_decay=0.1),
    "adagrad, decoupled": lambda params: FusedAdagrad(params, lr=0.01, weight_decay=0.1, adagrad_w_mode=True),
}
every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


def params_of(*dtypes, device=None):
    """Four parameters of different shapes for each of ``dtypes``, always the same values."""
    device = device or torch.empty(0).device  # get_default_device() of torch 2.9 fails after a mode has ended
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2, 1, 3), ()]
    return [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for dtype in dtypes
        for shape in shapes
    ]


def copied(params):
    return [p.detach().clone().requires_grad_() for p in params]


def give_gradients(params, step, scale=1.0):
    """Set random gradients that depend on ``step`` only."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.device, param.dtype)


def train(optimizer, params, steps, start=0):
    for step in range(start, start + steps):
        give_gradients(params, step)
        optimizer.step()


def assert_same_training(pairs, steps, start):
    """Train each (params, optimizer) for ``steps`` and demand equal parameters, bit for bit."""
    for params, optimizer in pairs:
        train(optimizer, params, steps, start)
    assert_equal(*[params for params, _ in pairs])


def tensors_in(value):
    """Copies of all tensors and numbers in nested dicts and lists, as tensors."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, dict):
        return [t for key in sorted(value, key=str) for t in tensors_in(value[key])]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_in(item)]
    return [torch.tensor(value)] if isinstance(value, (int, float)) else []


def assert_equal(a, b):
    """All tensors in ``a`` and ``b`` are equal in dtype and value."""
    a, b = tensors_in(a), tensors_in(b)
    assert len(a) == len(b) > 0
    for first, second in zip(a, b, strict=True):
        assert first.dtype is second.dtype
        assert torch.equal(first, second)


def assert_close(a, b, tolerance):
    for first, second in zip(a, b, strict=True):
        torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)
