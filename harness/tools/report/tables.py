"""The tables of a report."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import plural
from harness.runs.reader import Record
from harness.tools.report import formatting, reproduce
from harness.tools.report.run_set import ReportedRun, RunSet

MAX_COLUMNS = 8  # of varied settings


@dataclass(frozen=True)
class Cell:
    """``order``: the sort key, empty if unknown. ``state``: of a run, otherwise empty."""

    text: str
    order: Any = None
    state: str = ""


@dataclass(frozen=True)
class ReportTable:
    """``caption``: a title with the order of the rows."""

    caption: str
    header: list[str]
    rows: list[list[Cell]]


def all_runs(runs: RunSet) -> ReportTable:
    """One row per run, the best first."""
    common = _common_settings(runs)
    varied = [key for key in runs.varied if key in common][:MAX_COLUMNS]
    keys, metric = [formatting.key(key) for key in varied], formatting.metric(runs.metric)
    header = ["run", "state", "ranks", *keys, metric, "best at epoch", "epochs done", "total time", "rows/s",
              "skipped steps", "commit", "folder"]  # fmt: skip
    rows = []
    for run in runs.ranked:
        past = run.history
        ends = past.validation.at["epoch"]
        cells = [
            Cell(run.label),
            Cell(formatting.STATES[run.record.state], run.record.state, run.record.state),
            Cell(run.record.world_size_text or formatting.NOTHING, run.record.world_sizes[-1] if run.ranks else ""),
            *(_setting(run.settings.get(key)) for key in varied),
            number(run.best, formatting.best),
            number(run.at_best("epoch"), formatting.number),
            number(float(ends[-1]) if len(ends) else None, formatting.number),
            number(past.wall_s, formatting.duration),
            number(past.rows_per_s, formatting.count),
            number(past.skipped, formatting.count),
            Cell(reproduce.commit(run)),
            Cell(run.path),
        ]
        rows.append(cells)
    return ReportTable("Runs, the best first", header, rows)


def _common_settings(runs: RunSet) -> set[str]:
    """Settings that most runs have; those of a single task mean nothing to the other runs."""
    counts = Counter(key for run in runs.runs for key in run.settings)
    return {key for key, count in counts.items() if 2 * count > len(runs.runs)}


def number(value: float | None, text: Callable[[float | None], str]) -> Cell:
    """Return the cell of a number, which is sorted by its value."""
    return Cell(text(value), "" if value is None or value != value else value)


def _setting(value: Any) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(formatting.setting(value), value)
    return Cell(formatting.setting(value))


def speed_up(runs: RunSet) -> ReportTable:
    """The finished runs of a recipe at each number of ranks, compared with its smallest number. Of several runs the
    mean speed."""
    runs_of_recipe: dict[str, dict[int, list[ReportedRun]]] = {}
    for run in runs.ranked:
        if run.world_size and run.record.state == "finished" and run.history.rows_per_s:
            runs_of_recipe.setdefault(run.recipe, {}).setdefault(run.world_size, []).append(run)
    rows = []
    for by_world in (by_world for by_world in runs_of_recipe.values() if len(by_world) > 1):
        label = runs.describe(next(iter(by_world.values()))[0], without=("seed", "batch.per_rank"))
        speeds = {
            world: statistics.fmean(run.history.rows_per_s or 0.0 for run in by_world[world])
            for world in sorted(by_world)
        }
        base = min(speeds)
        for world, speed in speeds.items():
            times = speed / speeds[base]
            rows.append([
                Cell(label), Cell(str(world)), number(speed, formatting.count), Cell(f"{times:.2f}×"),
                number(times * base / world, formatting.percent), Cell(", ".join(run.place for run in by_world[world])),
            ])  # fmt: skip
    return ReportTable("Compared runs", ["recipe", "ranks", "rows/s", "speed-up", "efficiency", "runs compared"], rows)


def seeds(runs: RunSet) -> ReportTable:
    """Mean and spread of recipes with several seeds."""
    rows = []
    groups = [group for group in runs.seed_groups if len(group.values) > 1]
    for group in sorted(groups, key=lambda group: group.mean or 0.0, reverse=runs.direction == "max"):
        run, values = group.runs[0], group.values
        mean, least, most = (number(value, formatting.best) for value in (group.mean, min(values), max(values)))
        rows.append([
            Cell(runs.describe(run)), Cell(run.record.world_size_text or formatting.NOTHING),
            Cell(", ".join(group.by_seed)), mean, Cell(f"± {formatting.number(group.spread, 2)}", group.spread),
            least, most,
        ])  # fmt: skip
    header = ["recipe", "ranks", "seeds", "mean", "spread", "min", "max"]
    return ReportTable("Best values over seeds, the best mean first", header, rows)


def states(runs: Sequence[ReportedRun]) -> str:
    """ "3 finished, 1 failed" """
    counts: Counter[str] = Counter(run.record.state for run in runs)
    return ", ".join(f"{counts[state]} {state}" for state in formatting.STATES if counts[state])


def problems(run: ReportedRun) -> list[str]:
    """Why a run did not finish, which files are missing or damaged, and how many rows could not be read; empty if all
    is well."""
    failure, lines = run.record.failure, []
    if failure:
        when = f"at step {step}" if (step := failure.get("step")) else "at its start"
        lines.append(f"{failure.get('error') or 'failed'} (rank {failure.get('rank')} {when}): {_reason(run.record)}")
        lines += [f"-> {line}" for line in str(failure.get("hint") or "").splitlines()[:1]]
    elif run.record.trial and run.record.trial.error:
        lines.append(run.record.trial.error.strip().splitlines()[0])
    elif run.record.state in ("stopped", "unfinished"):
        if run.record.state == "unfinished":
            lines.append("it was killed, or trains where this machine does not see its lock")
        lines.append(f"-> to resume it: {reproduce.resume_command(run)}")
    return [*lines, *run.record.problems, *_unreadable(run.record.summary)]


def _unreadable(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line if rows could not be read in training or in the newest evaluation."""
    evaluation = summary.get("evaluation")
    replaced, left_out = summary.get("bad_rows"), evaluation.get("bad_rows") if isinstance(evaluation, dict) else 0
    if replaced or left_out:
        counts = f"training replaced them {plural(replaced or 0, 'time')}, validation left out {left_out or 0}"
        yield f"rows that could not be read, which metrics.jsonl names: {counts}"


def failed_starts(runs: RunSet) -> tuple[str, list[tuple[str, str]]]:
    """Return a line with the number of failed starts, empty without any, and (reason, folders that failed for it) for
    each reason."""
    folders: dict[str, list[str]] = {}
    for record in runs.failed_starts:
        reason = formatting.without_working_folder(_reason(record))
        folders.setdefault(reason, []).append(formatting.path(record.path))
    line = f"{plural(len(runs.failed_starts), 'start')} failed before the first step" if folders else ""
    return line, [(reason, ", ".join(places)) for reason, places in folders.items()]


def _reason(record: Record) -> str:
    return next(iter(str(record.failure.get("message") or "").strip().splitlines()), "no message")


def has_problem(run: ReportedRun) -> bool:
    """Return True if there is a problem to report; a running run and a pruned or waiting trial are none."""
    return run.record.state not in ("finished", "running", "pruned", "waiting") or bool(problems(run))
