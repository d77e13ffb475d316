"""Apex's own amp tests that are not elsewhere, rewritten: cache, loss scale, state dict (contract 6.1)."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.apex import amp
from tests.apex.shared import backward, floating_dtypes


class Weighted(nn.Module):
    """Uses its weight twice per forward, through an operation of one of O1's lists."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter((torch.arange(16.0).reshape(4, 4) / 16).to(dtype))

    def forward(self, x):
        for _ in range(2):
            if self.kind == "reduced":
                x = x.mm(self.weight)
            elif self.kind == "float32":
                x = x + F.log_softmax(self.weight, -1)
            else:
                x = torch.cat([x, self.weight.tanh()]).narrow(0, 0, 4) + self.weight
        return x.float().sum()


@pytest.mark.contract("6.1.test_cache", "3.6")
@pytest.mark.parametrize("kind", ["reduced", "float32", "promoted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_training_evaluating_and_training_again_gives_the_same_gradient(kind, dtype):
    x = torch.arange(16.0).reshape(4, 4) / 8
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model = Weighted(kind, dtype)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=4.0, verbosity=0)

    def gradient():
        optimizer.zero_grad()
        backward(model(x), optimizer)
        return model.weight.grad.clone()

    first = gradient()
    with torch.no_grad():
        evaluated = model(x)
    assert torch.equal(gradient(), first)
    amp.reset()
    expected = (reference if kind != "reduced" else reference.half())(x.half() if kind == "reduced" else x)
    expected.backward()
    torch.testing.assert_close(evaluated, expected.detach(), rtol=2e-3, atol=0)
    torch.testing.assert_close(first.float(), reference.weight.grad.float(), rtol=4e-3, atol=0)
    assert first.dtype is dtype


@pytest.mark.contract("6.1.test_loss_scale_decrease", "2.4")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_each_loss_scale_halves_as_often_as_its_loss_overflows(level):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, num_losses=3, verbosity=0)
    before = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
    for loss_id, overflows in enumerate((0, 1, 2)):
        for k in range(3):
            with amp.scale_loss(model(torch.ones(1, 4)).sum() * 1e-3, optimizer, loss_id=loss_id) as loss:
                loss.backward()
                if k >= 3 - overflows:
                    model.weight.grad[0, 0] = float("inf")
            optimizer.step()
            optimizer.zero_grad()
    state = amp.state_dict()
    for k, start in enumerate(before):
        assert state[f"loss_scaler{k}"] == {"loss_scale": start / 2**k, "unskipped": 3 if k == 0 else 0}


@pytest.mark.contract("6.1.test_state_dict", "3.5")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_adam_learns_and_no_state_dict_holds_reduced_precision(level):
    model = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([1, 7, 3, 9])
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        backward(loss, optimizer)
        skipped = optimizer._amp_stash.already_patched
        optimizer.step()
        if not skipped:
            losses.append(loss.item())
    assert len(losses) >= 8
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    assert floating_dtypes([model.state_dict(), optimizer.state_dict()]) == {torch.float32}


@pytest.mark.contract("2.5")
def test_differences_from_a_torch_grad_scaler():
    """Gradients are in true units right after the context, float16 gradients are unscaled too, and contexts count."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O3", loss_scale="dynamic", verbosity=0)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 2.0**10
    for _ in range(2):
        backward(model(torch.tensor([[1.0, 2.0]])).sum(), optimizer)
    assert model.weight.grad.dtype is torch.float16
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e9)  # without unscaling first
    torch.testing.assert_close(norm.float(), torch.tensor(20.0).sqrt(), rtol=1e-3, atol=0)
    optimizer.step()
    assert scaler._unskipped == 2
    scaler._loss_scale, scaler._unskipped = 2.0**24, 1999
    scaler.update_scale()
    assert scaler.loss_scale() == 2.0**24
