"""Save at step 5, go on in a new process: bitwise the unbroken run, for every level and shape of training (3.5, 10.1).

The processes are real: what survives is what is in the file.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.apex import amp
from harness.apex.parallel.LARC import LARC
from tests.ranks import run_ranks

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
SHAPES = ("adam", "momentum", "larc", "two optimizers", "three losses")
SAVED_AT, STEPS = 5, 10


class Training:
    """One run: models, optimizers and losses of ``shape`` at ``level``. A loss overflows at steps 3 and 7."""

    def __init__(self, level: str, shape: str) -> None:
        amp.reset()
        torch.manual_seed(0)
        self.models = [self._net(), self._net()]
        parameters = [list(model.parameters()) for model in self.models]
        # O3 steps in float16, where Adam's usual eps is 0
        if shape == "adam":
            self.optimizers = [torch.optim.Adam(parameters[0] + parameters[1], lr=1e-2, eps=1e-3)]
        elif shape == "larc":
            inner = torch.optim.SGD(parameters[0] + parameters[1], lr=0.1, momentum=0.9, weight_decay=1e-2)
            self.optimizers = [LARC(inner)]
        elif shape == "two optimizers":
            self.optimizers = [
                torch.optim.Adam(parameters[0], lr=1e-2, eps=1e-3),
                torch.optim.SGD(parameters[1], lr=0.1, momentum=0.9),
            ]
        else:
            self.optimizers = [torch.optim.SGD(parameters[0] + parameters[1], lr=0.1, momentum=0.9)]
        self.num_losses = 3 if shape == "three losses" else len(self.optimizers)
        amp.initialize(self.models, self.optimizers, opt_level=level, num_losses=self.num_losses, verbosity=0)

    @staticmethod
    def _net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def step(self, step: int) -> None:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        for loss_id in range(self.num_losses):
            first, second = (model(x).float() for model in self.models)
            loss = (first.square().mean(), second.abs().mean(), (first - second).square().mean())[loss_id]
            chosen = self.optimizers
            if loss_id == 0:
                loss = loss + second.mean() * 1e-4 if len(chosen) == 1 else loss
                loss = loss * float("inf") if step in (3, 7) and self._scales(loss_id) else loss
            # several losses reach both models: every optimizer is given
            with amp.scale_loss(loss, chosen, loss_id=loss_id) as scaled_loss:
                scaled_loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    @staticmethod
    def _scales(loss_id: int) -> bool:
        return amp._amp_state.loss_scalers[loss_id].dynamic

    def state(self) -> dict:
        return {
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "amp": amp.state_dict(),
        }

    def load(self, state: dict) -> None:
        for model, saved in zip(self.models, state["models"], strict=True):
            model.load_state_dict(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        amp.load_state_dict(state["amp"])


def unbroken(folder: str) -> None:
    """Train every case through, saving in the middle and at the end."""
    for level in LEVELS:
        for shape in SHAPES:
            run = Training(level, shape)
            for step in range(STEPS):
                if step == SAVED_AT:
                    torch.save(run.state(), f"{folder}/{level} {shape} middle.pt")
                run.step(step)
            torch.save(run.state(), f"{folder}/{level} {shape} end.pt")


def resumed(folder: str) -> None:
    """Go on with every case from the middle."""
    for level in LEVELS:
        for shape in SHAPES:
            run = Training(level, shape)
            run.load(torch.load(f"{folder}/{level} {shape} middle.pt", weights_only=True))
            for step in range(SAVED_AT, STEPS):
                run.step(step)
            torch.save(run.state(), f"{folder}/{level} {shape} resumed.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    for process in (unbroken, resumed):
        run_ranks(1, process, str(folder), group=False, timeout_s=120)
    return folder


def differences(one, other, path=()):
    """Paths where two states differ in type, dtype, shape or a single bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype is not other.dtype or not torch.equal(one, other):
            yield path
    elif type(one) is not type(other):
        yield path
    elif isinstance(one, dict):
        if list(one) != list(other):
            yield path
        for key in one:
            yield from differences(one[key], other.get(key), (*path, key))
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            yield path
        for index, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, (*path, index))
    elif one != other:
        yield path


@pytest.mark.contract("3.5", "10.1", "10.2", "8")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_resumed_run_is_bitwise_the_unbroken_one(folder, level, shape):
    middle, end, resumed = (
        torch.load(folder / f"{level} {shape} {when}.pt", weights_only=True) for when in ("middle", "end", "resumed")
    )
    assert list(differences(middle, end)), "nothing was trained after the checkpoint"
    assert list(differences(end, resumed)) == []
    if level in ("O1", "O2"):
        scales = {name: scaler["loss_scale"] for name, scaler in end["amp"].items()}
        assert scales["loss_scaler0"] == 2.0**14, "the overflows are part of the run"
    for path in (("models",), ("optimizers",)):
        for tensor in _tensors(end[path[0]]):
            assert torch.isfinite(tensor).all()
            assert tensor.dtype is torch.float32 or level == "O3" or not tensor.is_floating_point()


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)
