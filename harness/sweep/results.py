"""``sweep.json``: what the sweep is and what came of each trial so far, for whoever reports on it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.runs import layout
from harness.runs.files import finite, write_atomically
from harness.sweep.plan import Plan
from harness.sweep.space import Settings, identity
from harness.sweep.spec import Choices, Range, axes
from harness.sweep.study import Trial


def run_name(number: int) -> str:
    """The run folder of trial ``number``, inside ``trials/``."""
    return f"{number:04d}"


def run_folder(sweep: Path, number: int) -> Path:
    return sweep / layout.TRIALS / run_name(number)


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
        "run": f"{layout.TRIALS}/{run_name(trial.number)}",
        "params": trial.settings,
        "world": world(trial.settings, plan),
        "state": trial.state,
        "value": trial.value,
        "error": trial.error,
    }


def world(settings: Settings, plan: Plan) -> int:
    """How many ranks a trial has."""
    launch = plan.alike(settings).launch
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


@dataclass(frozen=True)
class OverSeeds:
    """Finished trials that differ by their seed alone. ``deviation``: of the sample, None of a single one."""

    settings: dict[str, Any]
    trials: list[Trial]
    mean: float
    deviation: float | None


def over_seeds(trials: Sequence[Trial], direction: str) -> list[OverSeeds]:
    """One entry for each setting that has finished trials, the best mean first."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.state == "finished" and trial.value is not None:
            groups.setdefault(identity(_without_seed(trial)), []).append(trial)
    found = []
    for group in groups.values():
        values = [trial.value for trial in group if trial.value is not None]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        found.append(OverSeeds(_without_seed(group[0]), group, statistics.mean(values), deviation))
    return sorted(found, key=lambda entry: entry.mean, reverse=direction == "maximize")


def _without_seed(trial: Trial) -> dict[str, Any]:
    return {key: value for key, value in trial.settings.items() if key != "seed"}
