"""Reads the folder of a sweep. Its trials are run folders, which ``harness.runs.reader`` reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from harness.runs import layout
from harness.runs.files import read_or_empty

TrialState = Literal["waiting", "running", "finished", "pruned", "failed"]


@dataclass(frozen=True)
class Trial:
    """A trial of a sweep. ``state`` is None if it is not one; ``value`` is that of the sweep's metric."""

    number: int
    params: dict[str, Any]
    world: int | None
    state: TrialState | None
    value: float | None
    error: str | None
    run: Path
    """Its run folder."""


@dataclass(frozen=True)
class Sweep:
    """A sweep folder. ``space`` is {key: values or a description}."""

    path: Path
    name: str
    metric: str | None
    direction: Literal["max", "min"] | None
    space: dict[str, Any]
    trials: list[Trial]
    problems: list[str]


def read(path: Path) -> Sweep | None:
    """Return the sweep folder at ``path``; None if it is not one."""
    if not os.path.isfile(path / layout.SWEEP):  # Path.is_file raises for a folder one may not enter
        return None
    problems: list[str] = []
    content = read_or_empty(path / layout.SWEEP, dict, problems)
    directions: dict[str, Literal["max", "min"]] = {"maximize": "max", "minimize": "min"}
    metric, space, trials = (content.get(key) for key in ("metric", "space", "trials"))
    entries = [entry for entry in trials if isinstance(entry, dict)] if isinstance(trials, list) else []
    return Sweep(
        path,
        str(content.get("name") or path.name),
        metric if isinstance(metric, str) else None,
        directions.get(str(content.get("direction"))),
        space if isinstance(space, dict) else {},
        [_trial(path, entry, index) for index, entry in enumerate(entries)],
        problems,
    )


def _trial(sweep: Path, entry: dict[str, Any], index: int) -> Trial:
    """Return an entry of ``sweep.json``; values of the wrong type are ignored."""
    run = Path(str(entry.get("run")))
    if run.is_absolute() or ".." in run.parts:  # written by someone else, about a run that is not of this sweep
        run = Path(layout.TRIALS, run.name)
    number, params, world, state, value = (entry.get(key) for key in ("number", "params", "world", "state", "value"))
    return Trial(
        number if isinstance(number, int) else index,
        params if isinstance(params, dict) else {},
        world if isinstance(world, int) else None,
        state if state in get_args(TrialState) else None,
        float(value) if isinstance(value, int | float) else None,
        str(entry["error"]) if entry.get("error") else None,
        sweep / run,
    )
