"""``sweep.json``: what the sweep is and what came of each trial so far, for whoever reports on it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.files import finite, write_atomically
from harness.sweep.plan import Plan
from harness.sweep.space import identity
from harness.sweep.spec import Choices, Range, axes
from harness.sweep.study import Trial


def run_name(number: int) -> str:
    """The run folder of trial ``number``, inside ``trials/``."""
    return f"{number:04d}"


def write(path: Path, plan: Plan, trials: Sequence[Trial]) -> None:
    """All of it, or what was there before."""
    content = {
        "name": plan.file.sweep.name,
        "direction": plan.direction,
        "metric": plan.metric,
        "base": plan.file.base,
        "space": _space(plan),
        "trials": [_trial(trial, plan) for trial in trials],
    }
    write_atomically(path, json.dumps(finite(content), indent=1) + "\n")


def _trial(trial: Trial, plan: Plan) -> dict[str, Any]:
    return {
        "number": trial.number,
        "run": f"trials/{run_name(trial.number)}",
        "params": trial.settings,
        "world": world(trial.settings, plan),
        "state": trial.state,
        "value": trial.value,
        "error": trial.error,
    }


def world(settings: Mapping[str, Any], plan: Plan) -> int:
    """How many ranks a trial has."""
    launch = plan.trials[0].config.launch
    return int(settings.get("launch.nproc", launch.nproc)) * int(settings.get("launch.nnodes", launch.nnodes))


def _space(plan: Plan) -> dict[str, Any]:
    """{setting: its values, or {low, high, ...}}."""
    sweep = plan.file.sweep
    if isinstance(sweep.space, list):
        found: dict[str, dict[str, Any]] = {key: {} for key in axes(sweep)}
        for trial in plan.trials:
            for key, value in trial.settings.items():
                found[key][identity({key: value})] = value
        return {key: list(values.values()) for key, values in found.items()}
    space: dict[str, Any] = {key: _axis(axis) for key, axis in sweep.space.items()}
    return {**space, "seed": sweep.seeds} if sweep.seeds else space


def _axis(axis: Any) -> Any:
    if isinstance(axis, Range):
        return axis.model_dump(exclude_none=True)
    return axis.choices if isinstance(axis, Choices) else axis


def ranked(trials: Sequence[Trial], direction: str) -> list[Trial]:
    """The best first, then those that were given up, then those that failed, then those that are to come."""
    order = {"finished": 0, "pruned": 1, "running": 2, "failed": 3, "waiting": 4}
    sign = -1.0 if direction == "maximize" else 1.0

    def place(trial: Trial) -> tuple[int, float, int]:
        value = sign * trial.value if trial.value is not None else float("inf")
        return order[trial.state], value, trial.number

    return sorted(trials, key=place)
