"""A run that is there already, for whoever uses its model: its configuration, and its best weights in a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from harness.config import loader
from harness.config.schema import Config
from harness.errors import CheckpointError, ConfigError
from harness.runs import layout


def configuration(run: Path, overrides: Sequence[str]) -> Config:
    """The configuration of the run folder ``run``, with ``overrides``. Raises ConfigError where it is no run that has
    been trained, so that there are best weights."""
    if not (run / layout.CONFIG).is_file():
        configs = [*Path().glob(f"runs/*/{layout.CONFIG}"), *run.glob(f"*/{layout.CONFIG}")]
        runs = sorted({path.parent for path in configs})
        there = "; there are " + ", ".join(map(str, runs[:5])) if runs else ""
        raise ConfigError("this is not a run folder: it has no config.yaml", where=str(run), hint=f"name one{there}")
    if not weights(run).is_file():
        raise ConfigError(
            "this run has no weights yet: it was not evaluated so far",
            where=str(run),
            hint="its first evaluation, at the end of an epoch, writes weights.safetensors: "
            f"python driver.py -c {run / layout.CONFIG}",
        )
    return loader.load(run / layout.CONFIG, overrides)


def weights(run: Path) -> Path:
    """Where the best weights of ``run`` are."""
    return run / layout.WEIGHTS


def best(run: Path) -> dict[str, Tensor]:
    """The best weights of ``run``, on the CPU. Raises CheckpointError where they cannot be read."""
    try:
        return load_file(weights(run))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the best weights cannot be read: {error}",
            where=str(weights(run)),
            hint="each evaluation that is the best so far writes them: train for another epoch",
        ) from None


def learned(run: Path) -> dict[str, Any]:
    """What the task took from the training data. Raises ConfigError where the run does not say."""
    try:
        facts = json.loads((run / layout.TASK).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"it cannot be read what this run learned of its data: {error}",
            where=str(run / layout.TASK),
            hint=f"start the run again, which writes the file: python driver.py -c {run / layout.CONFIG}",
        ) from None
    return facts if isinstance(facts, dict) else {}


def load(model: nn.Module, best: dict[str, Tensor], run: Path) -> None:
    """Put the weights into ``model``. Raises CheckpointError where they are not its own."""
    try:
        model.load_state_dict(best)
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights do not fit this model: {str(error).strip().splitlines()[-1].strip()}",
            where=str(weights(run)),
            hint="leave model and task as they were when it was trained",
        ) from None
