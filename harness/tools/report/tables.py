"""The tables of a report."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import plural
from harness.runs.reader import Record
from harness.tools.report import formatting, reproduce
from harness.tools.report.run_set import ReportedRun, RunSet

MAX_COLUMNS = 8  # of varied settings
MAX_NAMES = 5  # of failed starts in their line


@dataclass(frozen=True)
class Cell:
    """``order``: the sort key, empty if unknown. ``state``: of a run, otherwise empty."""

    text: str
    order: Any = None
    state: str = ""


@dataclass(frozen=True)
class RunTable:
    header: list[str]
    rows: list[list[Cell]]


def all_runs(runs: RunSet) -> RunTable:
    """One row per run, the best first."""
    common = _common_settings(runs)
    varied = [key for key in runs.varied if key in common][:MAX_COLUMNS]
    keys, metric = [formatting.key(key) for key in varied], formatting.metric(runs.metric)
    header = ["run", "state", "ranks", *keys, metric, "best at epoch", "epochs", "time", "rows/s", "skipped",
              "commit", "folder"]  # fmt: skip
    rows = []
    for run in runs.ranked:
        past = run.history
        ends = past.validation.at["epoch"]
        cells = [
            Cell(run.label),
            Cell(formatting.STATES[run.record.state], run.record.state, run.record.state),
            Cell(run.record.world_size_text or formatting.NOTHING, run.record.world_sizes[-1] if run.ranks else ""),
            *(_setting(run.settings.get(key)) for key in varied),
            _number(run.best, lambda value: formatting.number(value, formatting.BEST_DIGITS)),
            _number(run.at_best("epoch"), formatting.number),
            _number(float(ends[-1]) if len(ends) else None, formatting.number),
            _number(past.wall_s, formatting.duration),
            _number(past.rows_per_s, formatting.count),
            _number(past.skipped, formatting.count),
            Cell(reproduce.commit(run)),
            Cell(run.path),
        ]
        rows.append(cells)
    return RunTable(header, rows)


def _common_settings(runs: RunSet) -> set[str]:
    """Settings that most runs have; those of a single task mean nothing to the other runs."""
    counts = Counter(key for run in runs.runs for key in run.settings)
    return {key for key, count in counts.items() if 2 * count > len(runs.runs)}


def _number(value: float | None, shown: Any) -> Cell:
    return Cell(shown(value), "" if value is None or value != value else value)


def _setting(value: Any) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(formatting.setting(value), value)
    return Cell(formatting.setting(value))


def speed_up_rows(runs: RunSet) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows): the finished runs of a recipe at each number of ranks, compared with its smallest number.
    Of several runs the mean speed."""
    found: dict[str, dict[int, list[ReportedRun]]] = {}
    for run in runs.ranked:
        if run.world_size and run.record.state == "finished" and run.history.rows_per_s:
            found.setdefault(run.recipe, {}).setdefault(run.world_size, []).append(run)
    rows = []
    for by_world in (by_world for by_world in found.values() if len(by_world) > 1):
        label = runs.describe(next(iter(by_world.values()))[0], without=("seed", "batch.per_rank"))
        speeds = {
            world: statistics.fmean(run.history.rows_per_s or 0.0 for run in by_world[world])
            for world in sorted(by_world)
        }
        base = min(speeds)
        for world, speed in speeds.items():
            times = speed / speeds[base]
            compared = ", ".join(run.place for run in by_world[world])
            rows.append(
                [label, str(world), formatting.count(speed), f"{times:.2f}×", formatting.percent(times * base / world),
                 compared]
            )  # fmt: skip
    return ["recipe", "ranks", "rows/s", "speed-up", "efficiency", "runs compared"], rows


def seeds_rows(runs: RunSet) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows): mean and spread of recipes with several seeds."""
    header = ["recipe", "ranks", "seeds", "mean", "spread", "min", "max"]
    rows = []
    for group in runs.seed_groups:
        if len(group.values) > 1:
            run = group.runs[0]
            values = group.values
            numbers = [formatting.number(value, 5) for value in (group.mean, min(values), max(values))]
            rows.append(
                [runs.describe(run), run.record.world_size_text or formatting.NOTHING, ", ".join(group.by_seed),
                 numbers[0], f"± {formatting.number(group.spread, 2)}", *numbers[1:]]
            )  # fmt: skip
    return header, rows


def states(runs: Sequence[ReportedRun]) -> str:
    """ "3 finished, 1 failed" """
    counts: Counter[str] = Counter(run.record.state for run in runs)
    return ", ".join(f"{counts[state]} {state}" for state in formatting.STATES if counts[state])


def problems(run: ReportedRun) -> list[str]:
    """Why a run did not finish, and which files are missing or damaged; empty if all is well."""
    failure, lines = run.record.failure, []
    if failure:
        when = f"at step {step}" if (step := failure.get("step")) else "at its start"
        lines.append(f"{failure.get('error') or 'failed'} (rank {failure.get('rank')} {when}): {_reason(run.record)}")
        lines += [f"-> {line}" for line in str(failure.get("hint") or "").splitlines()[:1]]
    elif run.record.trial and run.record.trial.error:
        lines.append(run.record.trial.error.strip().splitlines()[0])
    elif run.record.state == "stopped":
        lines.append(f"-> to resume it: {reproduce.resume_command(run)}")
    return [*lines, *run.record.problems]


def failed_starts(runs: RunSet) -> tuple[str, list[tuple[str, str]]]:
    """Return a line with the number and the names of the failed starts, empty without any, and (reason, folders that
    failed for it) for each reason."""
    folders: dict[str, list[str]] = {}
    for record in runs.failed_starts:
        reason = formatting.without_working_folder(_reason(record))
        folders.setdefault(reason, []).append(formatting.path(record.path))
    names = [record.path.name for record in runs.failed_starts]
    shown = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
    line = f"{plural(len(names), 'start')} failed before the first step: {shown}" if names else ""
    return line, [(reason, ", ".join(places)) for reason, places in folders.items()]


def _reason(record: Record) -> str:
    return next(iter(str(record.failure.get("message") or "").strip().splitlines()), "no message")


def has_problem(run: ReportedRun) -> bool:
    """Return True if there is a problem to report; a pruned or waiting trial of a sweep is not a problem."""
    return run.record.state not in ("finished", "pruned", "waiting") or bool(problems(run))
