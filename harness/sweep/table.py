"""The sweep as text: one table of all trials, as wide as the terminal allows, live or at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.sweep.plan import Plan
from harness.sweep.progress import Progress
from harness.sweep.space import columns, spelled
from harness.sweep.study import Trial

_WORDS = 60  # of an error in a table


def lines(trials: Sequence[Trial], plan: Plan, seen: Mapping[int, Progress], width: int) -> list[str]:
    """The table with its heading: a row a trial, in the order given. ``seen``: how far each came, where known."""
    varied = columns([trial.settings for trial in trials] or [planned.settings for planned in plan.trials])
    heading = ["trial", *varied.values(), "state", plan.metric, "epoch", "seconds", ""]
    rows = [heading, *(_row(trial, list(varied), seen.get(trial.number), plan) for trial in trials)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(heading))]
    numeric = {0, *(place for place, key in enumerate(varied, 1) if _is_numeric(trials, key))}
    numeric |= {len(varied) + place for place in (2, 3, 4)}
    return [
        "  ".join(
            cell.rjust(size) if place in numeric else cell.ljust(size)
            for place, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()[:width]
        for row in rows
    ]


def _row(trial: Trial, keys: Sequence[str], progress: Progress | None, plan: Plan) -> list[str]:
    told = " ".join((trial.error or "").split())
    value = progress.value if progress and trial.state == "running" else trial.value
    epochs = trial.settings.get("train.epochs", plan.alike(trial.settings).train.epochs)
    return [
        f"{trial.number:04d}",
        *(_cell(trial.settings.get(key)) for key in keys),
        trial.state,
        "" if value is None else f"{value:.5g}",
        f"{progress.epoch}/{epochs}" if progress and progress.step else "",
        f"{progress.wall_s:.0f}" if progress and progress.wall_s else "",
        told if len(told) <= _WORDS else f"{told[: _WORDS - 1]}…",
    ]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else spelled(value)


def _is_numeric(trials: Sequence[Trial], key: str) -> bool:
    return all(isinstance(trial.settings.get(key), int | float) for trial in trials)


def shortened(rows: list[str], height: int) -> list[str]:
    """At most ``height`` of the rows, saying how many are left out."""
    if len(rows) <= height:
        return rows
    kept = max(1, height - 1)
    return [*rows[:kept], f"... and {len(rows) - kept} more"]


def counts(trials: Sequence[Trial], total: int) -> str:
    """The sweep in a line."""
    states = [trial.state for trial in trials]
    found = ", ".join(
        f"{states.count(state)} {state}" for state in ("running", "finished", "pruned", "failed") if state in states
    )
    return f"{total} trials: {found or 'none over yet'}"
