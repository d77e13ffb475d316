"""``sweep.json`` with the state of every trial, the ranking of trials, and their table for the terminal."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import plural
from harness.runs import layout
from harness.runs.files import finite, write_atomically
from harness.tools.report import formatting
from harness.tools.sweep.plan import Plan
from harness.tools.sweep.spec import Range, Settings, identity

if TYPE_CHECKING:
    from harness.tools.sweep.study import SweepTrial


def run_name(number: int) -> str:
    """Return the name of the run folder of trial ``number``."""
    return f"{number:04d}"


def run_folder(sweep: Path, number: int) -> Path:
    return sweep / layout.TRIALS / run_name(number)


def write(path: Path, plan: Plan, trials: Sequence[SweepTrial]) -> None:
    """Replace ``sweep.json`` atomically."""
    content = {
        "name": plan.file.spec.name,
        "direction": plan.direction,
        "metric": plan.metric,
        "base": plan.file.base,
        "space": _space(plan),
        "trials": [_trial(trial, plan) for trial in trials],
    }
    write_atomically(path, json.dumps(finite(content), indent=1) + "\n")


def _trial(trial: SweepTrial, plan: Plan) -> dict[str, Any]:
    launch = plan.trials[0].config.launch
    nproc = trial.settings.get("launch.nproc", launch.nproc)
    return {
        "number": trial.number,
        "run": f"{layout.TRIALS}/{run_name(trial.number)}",
        "params": trial.settings,
        "world": int(nproc) * int(trial.settings.get("launch.nnodes", launch.nnodes)),
        "state": trial.state,
        "value": trial.value,
        "error": trial.error,
    }


def _space(plan: Plan) -> dict[str, Any]:
    """Return {setting: its values, or {low, high, ...}}."""
    spec = plan.file.spec
    space: dict[str, Any] = {
        key: axis.model_dump(exclude_none=True) if isinstance(axis, Range) else axis for key, axis in spec.space.items()
    }
    return {**space, "seed": spec.seeds} if spec.seeds else space


def ranked(trials: Sequence[SweepTrial], direction: str) -> list[SweepTrial]:
    """Return the finished trials, the best first, then the pruned, running, failed and waiting ones."""
    order = {"finished": 0, "pruned": 1, "running": 2, "failed": 3, "waiting": 4}

    def place(trial: SweepTrial) -> tuple[int, float, int]:
        value = float("inf") if trial.value is None else _badness(trial.value, direction)
        return order[trial.state], value, trial.number

    return sorted(trials, key=place)


def _badness(value: float, direction: str) -> float:
    """Return a number that is lower for a better ``value``."""
    return -value if direction == "maximize" else value


@dataclass(frozen=True)
class SeedMean:
    """Finished trials that differ only in their seed."""

    settings: Settings
    trials: list[SweepTrial]
    mean: float
    deviation: float | None
    """The standard deviation of the sample; None for a single trial."""


def over_seeds(trials: Sequence[SweepTrial], direction: str) -> list[SeedMean]:
    """Return one mean per setting that has finished trials. Those of the most trials come first, in the order of their
    means: a setting whose other seeds failed must not win by the luckiest one."""
    groups: dict[str, list[SweepTrial]] = {}
    for trial in trials:
        if trial.state == "finished" and trial.value is not None:
            groups.setdefault(identity(_without_seed(trial)), []).append(trial)
    found = []
    for group in groups.values():
        values = [trial.value for trial in group if trial.value is not None]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        found.append(SeedMean(_without_seed(group[0]), group, statistics.mean(values), deviation))
    return sorted(found, key=lambda entry: (-len(entry.trials), _badness(entry.mean, direction)))


def _without_seed(trial: SweepTrial) -> Settings:
    return {key: value for key, value in trial.settings.items() if key != "seed"}


# The table


def table(trials: Sequence[SweepTrial], plan: Plan, width: int) -> list[str]:
    """Return the lines of the table with its heading, one row per trial in the given order, then each error, in full,
    after the trials that have it."""
    varied = plan.file.spec.axes
    heading = ["trial", *map(formatting.key, varied), "state", plan.metric]
    rows = [heading, *(_row(trial, varied) for trial in trials)]
    numbers = [
        place for place, key in enumerate(varied, 1)
        if all(isinstance(trial.settings.get(key), int | float) for trial in trials)
    ]  # fmt: skip
    names_by_error: dict[str, list[str]] = {}
    for trial in trials:
        if error := " ".join((trial.error or "").split()):
            names_by_error.setdefault(error, []).append(run_name(trial.number))
    errors = [f"{', '.join(names)}: {error}" for error, names in names_by_error.items()]
    return [*formatting.table(rows, right=[0, *numbers, len(varied) + 2], width=width), *errors]


def _row(trial: SweepTrial, keys: Sequence[str]) -> list[str]:
    return [
        run_name(trial.number),
        *(formatting.setting(trial.settings.get(key), 4) for key in keys),
        trial.state,
        "" if trial.value is None else f"{trial.value:.5g}",
    ]


def counts(trials: Sequence[SweepTrial], total: int) -> str:
    """Return the number of trials in each state, as one line."""
    count = Counter(trial.state for trial in trials)
    found = [f"{count[state]} {state}" for state in ("running", "finished", "pruned", "failed") if count[state]]
    return f"{plural(total, 'trial')}: {', '.join(found) or 'none finished yet'}"
