"""Apex's own amp tests that are not elsewhere, rebuilt in our words: cache, checkpointing, scale, state dict (6.1)."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.apex import amp


class Weighted(nn.Module):
    """Uses its weight twice a forward, through an operation of one of O1's lists."""

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
        with amp.scale_loss(model(x), optimizer) as loss:
            loss.backward()
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


def convolutional():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def train(model, optimizer, steps, num_losses, start=0):
    """Outputs of ``steps`` steps; the losses take turns."""
    outputs = []
    for step in range(start, start + steps):
        x = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(step))
        output = model(x)
        with amp.scale_loss(output.float().square().mean(), optimizer, loss_id=step % num_losses) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output.detach().clone())
    return outputs


def dtypes(value) -> set[torch.dtype]:
    if isinstance(value, torch.Tensor):
        return {value.dtype} if value.is_floating_point() else set()
    if isinstance(value, dict):
        return set().union(*map(dtypes, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(dtypes, value))
    return set()


@pytest.mark.contract("6.1.test_checkpointing", "3.5")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("num_losses", [1, 2])
@pytest.mark.parametrize("load_first", [False, True])
def test_restoring_in_the_middle(level, num_losses, load_first):
    def make():
        model = convolutional()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def start(model, optimizer):
        amp.initialize(model, optimizer, opt_level=level, num_losses=num_losses, verbosity=0)

    model, optimizer = make()
    start(model, optimizer)
    train(model, optimizer, 5, num_losses)
    file = io.BytesIO()
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    torch.save(checkpoint, file)
    assert dtypes(checkpoint) == {torch.float32}
    expected = train(model, optimizer, 5, num_losses, start=5)

    amp.reset()
    file.seek(0)
    loaded = torch.load(file)
    restored, optimizer = make()
    if not load_first:
        start(restored, optimizer)
    restored.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    if load_first:
        start(restored, optimizer)
    amp.load_state_dict(loaded["amp"])
    for ours, theirs in zip(train(restored, optimizer, 5, num_losses, start=5), expected, strict=True):
        assert torch.equal(ours, theirs)
    for name, value in model.state_dict().items():
        assert torch.equal(restored.state_dict()[name], value), name


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
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        skipped = optimizer._amp_stash.already_patched
        optimizer.step()
        if not skipped:
            losses.append(loss.item())
    assert len(losses) >= 8
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    assert dtypes(model.state_dict()) | dtypes(optimizer.state_dict()) == {torch.float32}


@pytest.mark.contract("2.5")
def test_where_a_grad_scaler_differs():
    """Gradients are in true units right after the context, float16 gradients are unscaled too, and contexts count."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O3", loss_scale="dynamic", verbosity=0)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 2.0**10
    for _ in range(2):
        with amp.scale_loss(model(torch.tensor([[1.0, 2.0]])).sum(), optimizer) as loss:
            loss.backward()
    assert model.weight.grad.dtype is torch.float16
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e9)  # without a call to unscale first
    torch.testing.assert_close(norm.float(), torch.tensor(20.0).sqrt(), rtol=1e-3, atol=0)
    optimizer.step()
    assert scaler._unskipped == 2
    scaler._loss_scale, scaler._unskipped = 2.0**24, 1999
    scaler.update_scale()
    assert scaler.loss_scale() == 2.0**24
