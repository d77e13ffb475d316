"""A task and a model with faults that make a run impossible to repeat or to resume, each where its name is."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from harness.training.task import Batch, TaskSection, model_builder, row_seed, seeded_torch


class Task(TaskSection):
    """Learn y = 2x. ``plant`` names the faults, joined by hyphens."""

    plant: str = ""

    def open(self, seed: int, cache_dir: Path | None) -> Line:
        return Line(self.plant.split("-"))


class Rows:
    """40 numbers from -1 to 1, with a little noise in training."""

    def __init__(self, planted: list[str]) -> None:
        self.planted, self.x = planted, np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
        self.calls = 0

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        x = torch.from_numpy(self.x[rows])
        noise = 0.01 * self.noise(int(rows[0]), epoch) if epoch is not None else 0.0
        return Batch(x + noise, 2 * x, rows.copy())

    def noise(self, row: int, epoch: int) -> float:
        found = 0.0
        if "managed" in self.planted:
            with seeded_torch(row_seed(0, epoch, row)):
                found += torch.rand(()).item()
            found += np.random.default_rng(row_seed(0, epoch, row)).random() + random.Random(row).random()
        if "random" in self.planted:
            found += random.random()
        if "shuffle" in self.planted:
            random.shuffle([1, 2])
        if "numpy" in self.planted:
            found += np.random.rand()
        if "torch" in self.planted:
            found += torch.rand(()).item()
        if "gamma" in self.planted:
            found += np.random.gamma(1.0)
        if "geometric" in self.planted:
            found += torch.empty(()).geometric_(0.5).item()
        if "separate" in self.planted:
            found += torch.rand((), generator=torch.Generator().manual_seed(row)).item()
        if "counter" in self.planted:
            self.calls += 1
        if "entropy" in self.planted:
            found += np.random.default_rng().random()
        if "unseeded" in self.planted:
            found += random.Random().random()
        if "clock" in self.planted:
            found += time.time() % 1
        if "hash" in self.planted:
            found += hash("a") % 997 / 997
        return found + self.calls


class Line:
    notes, fingerprint, summary = (), "line", {"kind": "a line"}

    def __init__(self, planted: list[str]) -> None:
        self.train = self.eval = Rows(planted)

    def label_counts(self, start: int, stop: int) -> None:
        return None

    def model(self, section: Any) -> nn.Module:
        return model_builder.build(section.name, section.args, {}, torch.zeros(2, 1))

    def prepare(self, inputs: Tensor) -> Tensor:
        return inputs

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    def evaluate(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {"loss": ((outputs - targets).square().sum(), torch.tensor(float(len(targets))))}

    def report(self, sums: Any) -> dict[str, float]:
        return {"loss": sums.ratio("loss")}


class Counting(nn.Linear):
    """Its output depends on how often it was called, which no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 1) -> (batch, 1)"""
        self.calls += self.training
        return super().forward(x) + 0.001 * self.calls


def line_of(plant: str) -> int:
    """The line of the fault ``plant`` in this file."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 2) if f'if "{plant}" in self.planted' in line)


def write_planted(folder: Path, plant: str, **settings: Any) -> Path:
    """A configuration with ``plant`` in its task, in ``folder``; ``settings`` replace sections."""
    tree = {
        "name": "planted",
        "output": str(folder / "runs"),
        "task": {"name": f"{__name__}.Task", "plant": plant},
        "model": {"name": "torch.nn.Linear", "args": {"in_features": 1, "out_features": 1}},
        "data": {"num_workers": 1},
        "batch": {"global": 8},
        "optimizer": {"name": "sgd", "lr": 0.01},
        "precision": {"opt_level": "O0"},
        "train": {"epochs": 2, "log_every": 1},
        "runtime": {"device": "cpu", "timeout_s": 30},
        **settings,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
