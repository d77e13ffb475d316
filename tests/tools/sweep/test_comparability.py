"""Rules for fair comparisons: each with a sweep that breaks it and one that satisfies it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.config import loader
from harness.tools.sweep.comparability import PlannedTrial, confounders
from harness.tools.sweep.spec import SweepSpec, grid, typed
from tests.fixtures import settings, write_yaml

GRID = {"launch.nproc": [1, 2], "data.shard": ["global"]}


def judged(
    tmp_path: Path, space: Any, parallel: int = 1, batch_norm: bool = False, seeds: tuple[int, ...] = (), **fixed: Any
) -> list[tuple[bool, str]]:
    """(refused, message) of each confounder; ``fixed``: settings, with __ for a dot."""
    base = write_yaml(tmp_path / "base.yaml", settings(tmp_path, batch={"global": 8}))
    common = {key.replace("__", "."): value for key, value in fixed.items()}
    sweep = SweepSpec.model_validate({"name": "x", "base": "b", "space": space, "seeds": list(seeds)})
    trials = [PlannedTrial(trial, loader.load(base, typed({**common, **trial}))) for trial in grid(sweep)]
    return [(found.refused, found.message) for found in confounders(trials, parallel, lambda config: batch_norm)]


PER_RANK = {"batch__global": None, "batch__per_rank": 4}
SCALED = {"optimizer__lr_scaling": "linear", "optimizer__lr_base_batch": 8}
REFUSED, NOTED = True, False


@pytest.mark.parametrize(
    ("space", "fixed", "verdict", "message"),
    [
        (GRID, PER_RANK, REFUSED, "different global batches (1 rank: 4; 2 ranks: 8)"),
        ([{"launch.nproc": 1, "batch.global": 8, "data.shard": "global"},
          {"launch.nproc": 2, "batch.global": 16, "data.shard": "global"}], {}, REFUSED, "different global batches"),
        ({"launch.nproc": [1, 2]}, {}, REFUSED, "data.shard=contiguous"),
        ({"launch.nproc": [1, 2]}, {"data__shard": "strided"}, REFUSED, "data.shard=strided"),
        (GRID, {"batch_norm": True}, REFUSED, "batch norm uses the rows of one rank"),
        (GRID, {"parallel": 2}, NOTED, "up to 2 trials at once"),
        ({"batch.global": [4, 8]}, {"train__max_steps": 5}, REFUSED, "different numbers of samples (20, 40)"),
        ({"batch.global": [4, 8], "train.max_steps": [5, 6]}, {}, NOTED, "different numbers of samples"),
        ([{"train.max_steps": 5}, {"optimizer.lr": 0.2}], {}, NOTED, "(whole epochs, 40)"),
        ({"train.epochs": [1, 2]}, {}, NOTED, "1, 2 epochs"),
        ({"optimizer.lr": [0.1, 0.2]}, {"train__patience": 2}, NOTED, "train.patience"),
        ({"batch.global": [4, 8]}, {"data__tail": "drop"}, NOTED, "data.tail=drop"),
        ([{"seed": 0, "optimizer.lr": 0.1}, {"seed": 1, "optimizer.lr": 0.2}], {}, REFUSED, "different seeds"),
        ({"batch.global": [8, 16], "optimizer.lr": [0.1]}, SCALED, NOTED, "optimizer.lr=0.1 into 0.1, 0.2"),
        ({"train.evaluate_every": [1, 2]}, {}, NOTED, "evaluated at different intervals"),
        ({"launch.threads": [1, 2]}, {}, NOTED, "launch.threads (1, 2)"),
        ({"runtime.device": ["cpu", "auto"]}, {}, NOTED, "runtime.device (auto, cpu)"),
    ],
)  # fmt: skip
def test_confounded_trials_are_refused_or_noted(tmp_path, space, fixed, verdict, message):
    found = judged(tmp_path, space, **fixed)
    assert [refused for refused, _ in found] == [verdict], found
    assert message in found[0][1]


@pytest.mark.parametrize(
    ("space", "fixed"),
    [
        ({"optimizer.lr": [0.1, 0.2], "batch.global": [4, 8]}, {}),
        ({**GRID, "batch.global": [4, 8]}, {}),
        (GRID, {"batch_norm": True, "parallel__sync_batchnorm": True}),
        ({"optimizer.lr": [0.1, 0.2]}, {"batch_norm": True, "data__shard": "contiguous"}),
        (GRID, {"seeds": (0, 1, 2)}),
        ({"seed": [0, 1], "optimizer.lr": [0.1, 0.2]}, {}),
        ([{"batch.global": 4, "train.max_steps": 20}, {"batch.global": 8, "train.max_steps": 10}], {}),
        ({"optimizer.lr": [0.1, 0.2]}, SCALED),
        ({"optimizer.lr": [0.1, 0.2]}, {"parallel": 4}),
    ],
)
def test_comparable_trials_have_no_confounder(tmp_path, space, fixed):
    assert judged(tmp_path, space, **fixed) == []
