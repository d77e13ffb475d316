"""A run saved at step 5 and resumed in a new process equals the uninterrupted one bit for bit (contract 3.5, 10.1).

At every level, for several shapes of training. The processes are real: only what is in the file survives.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.apex import amp
from harness.apex.parallel.LARC import LARC
from tests.apex.shared import LEVELS, backward, tensors_in
from tests.ranks import run_ranks

SHAPES = ("adam", "larc", "two optimizers", "three losses")
CASES = [(level, shape) for level in LEVELS for shape in SHAPES if shape == "adam" or level in ("O1", "O2", "O3")]
SAVED_AT, STEPS = 5, 10


class Training:
    """One run: models, optimizers and losses of ``shape`` at ``level``. A loss overflows at steps 3 and 7."""

    def __init__(self, level: str, shape: str) -> None:
        amp.reset()
        torch.manual_seed(0)
        self.models = [self._net(), self._net()]
        first, second = (list(model.parameters()) for model in self.models)

        def adam(parameters):
            return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3)  # O3 steps in float16, where the usual eps is 0

        def sgd(parameters, **options):
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **options)

        if shape == "adam":
            self.optimizers = [adam(first + second)]
        elif shape == "larc":
            self.optimizers = [LARC(sgd(first + second, weight_decay=1e-2))]
        elif shape == "two optimizers":
            self.optimizers = [adam(first), sgd(second)]
        else:
            self.optimizers = [sgd(first + second)]
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
            backward(loss, chosen, loss_id=loss_id)
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


def uninterrupted(folder: str) -> None:
    """Train every case without a break, saving in the middle and at the end."""
    for level, shape in CASES:
        run = Training(level, shape)
        for step in range(STEPS):
            if step == SAVED_AT:
                torch.save(run.state(), f"{folder}/{level} {shape} middle.pt")
            run.step(step)
        torch.save(run.state(), f"{folder}/{level} {shape} end.pt")


def resumed(folder: str) -> None:
    """Resume every case from the middle."""
    for level, shape in CASES:
        run = Training(level, shape)
        run.load(torch.load(f"{folder}/{level} {shape} middle.pt", weights_only=True))
        for step in range(SAVED_AT, STEPS):
            run.step(step)
        torch.save(run.state(), f"{folder}/{level} {shape} resumed.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    for process in (uninterrupted, resumed):
        run_ranks(1, process, str(folder), group=False, timeout_s=120)
    return folder


def outline(value):
    """``value`` with dtype and shape in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    if isinstance(value, dict):
        return [(key, outline(inner)) for key, inner in value.items()]
    return [outline(inner) for inner in value] if isinstance(value, list | tuple) else value


def equal(one, other) -> bool:
    """True if two states are equal in types, dtypes, shapes and every bit."""
    return repr(outline(one)) == repr(outline(other)) and all(map(torch.equal, tensors_in(one), tensors_in(other)))


@pytest.mark.contract("3.5", "10.1", "10.2", "8", "6.1.test_state_dict")
@pytest.mark.parametrize(("level", "shape"), CASES)
def test_resumed_run_equals_the_uninterrupted_one(folder, level, shape):
    middle, end, resumed = (
        torch.load(folder / f"{level} {shape} {when}.pt", weights_only=True) for when in ("middle", "end", "resumed")
    )
    assert not equal(middle, end), "nothing was trained after the checkpoint"
    assert equal(end, resumed)
    if level in ("O1", "O2"):
        scales = {name: scaler["loss_scale"] for name, scaler in end["amp"].items()}
        assert scales["loss_scaler0"] == 2.0**14, "the overflows are part of the run"
    for tensor in tensors_in([end["models"], end["optimizers"]]):
        assert torch.isfinite(tensor).all()
        assert tensor.dtype is torch.float32 or level == "O3" or not tensor.is_floating_point()
