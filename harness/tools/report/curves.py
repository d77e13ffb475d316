"""Learning curves: which runs are drawn, the points of each line, and what the reader can choose to see.

Runs that differ only by seed are one line, their mean, in a band from the smallest to the largest value. Only the
finished ones count, unless none has finished yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.errors import plural
from harness.tools.report.history import AXES, Curve
from harness.tools.report.run_set import ReportedRun, RunSet, SeedGroup, size_of

MAX_LINES = 24
NUM_COLORS = 8  # of the page's palette
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")
_BAND_POINTS = 100


@dataclass(frozen=True)
class CurveLine:
    """``runs``: those that the line is the mean of. ``color``: an index into the palette. Dash and symbol distinguish
    lines without color."""

    label: str
    runs: list[ReportedRun]
    color: int
    dash: str
    symbol: str

    @property
    def first(self) -> ReportedRun:
        return self.runs[0]


def choose(runs: RunSet) -> list[CurveLine]:
    """Return the best runs, MAX_LINES at most: a color and a symbol for each recipe, a dash for each world size."""
    drawn = [of_line for group in runs.seed_groups if (of_line := _drawn(group))][:MAX_LINES]
    recipes = list(dict.fromkeys(of_line[0].recipe for of_line in drawn))
    worlds = sorted({of_line[0].record.world_size_text for of_line in drawn}, key=lambda ranks: (len(ranks), ranks))
    lines = []
    for of_line in drawn:
        run = of_line[0]
        number = recipes.index(run.recipe)
        dash = worlds.index(run.record.world_size_text) + number // NUM_COLORS
        label = run.label if len(of_line) == 1 else _label(runs, of_line)
        color, symbol = number % NUM_COLORS, SYMBOLS[number % len(SYMBOLS)]
        lines.append(CurveLine(label, of_line, color, DASHES[dash % len(DASHES)], symbol))
    return lines


def _drawn(group: SeedGroup) -> list[ReportedRun]:
    """Return the runs with points; if some of them have finished, only these."""
    for some in (group.finished, group.runs):
        if drawn := [run for run in some if len(run.history.train) or len(run.history.validation)]:
            return drawn
    return []


def _label(runs: RunSet, of_line: Sequence[ReportedRun]) -> str:
    run = of_line[0]
    several = len({run_of_set.ranks for run_of_set in runs.runs}) > 1
    ranks = f" · {run.ranks}" if several and run.ranks else ""
    return f"{runs.describe(run)}{ranks} · mean of {size_of(of_line)}"


def points(line: CurveLine) -> dict[str, Any]:
    """Return the line for the page: {train, validation: {at: {axis: [...]}, values, low, high: {name: [...]}}}."""
    values: dict[str, Any] = {"label": line.label, "color": line.color, "dash": line.dash, "symbol": line.symbol}
    for part in ("train", "validation"):
        curves = [getattr(run.history, part) for run in line.runs]
        values[part] = _band([curve for curve in curves if len(curve) and curve.values])
    return values


def _band(curves: Sequence[Curve]) -> dict[str, Any]:
    if len(curves) < 2:
        curve = curves[0] if curves else None
        at = {axis: rounded(curve.at[axis]) for axis in AXES} if curve else {}
        return {
            "at": at,
            "values": {name: rounded(values) for name, values in curve.values.items()} if curve else {},
        }
    last = min(curve.steps[-1] for curve in curves)
    grid = curves[0].steps[curves[0].steps <= last]
    if len(grid) > _BAND_POINTS:
        grid = grid[np.unique(np.linspace(0, len(grid) - 1, _BAND_POINTS).astype(int))]
    at = {axis: rounded(np.mean([np.interp(grid, c.steps, c.at[axis]) for c in curves], axis=0)) for axis in AXES}
    band: dict[str, Any] = {"at": at, "values": {}, "low": {}, "high": {}}
    for name in curves[0].values:
        if all(name in curve.values for curve in curves):
            stacked = np.array([np.interp(grid, curve.steps, curve.values[name]) for curve in curves])
            sides = {"values": stacked.mean(0), "low": stacked.min(0), "high": stacked.max(0)}
            for side, values in sides.items():
                band[side][name] = rounded(values)
    return band


def rounded(values: np.ndarray) -> list[float | None]:
    """Six significant digits, more than a screen shows; None for values that are not finite."""
    return [None if value != value or abs(value) == np.inf else float(f"{value:.6g}") for value in values.tolist()]


# What the reader can choose


def axes(lines: Sequence[CurveLine]) -> list[tuple[str, str]]:
    """Return (key, title) of the horizontal axes, the first of which is chosen. A run that has not finished an epoch
    does not know its length: all its points are at epoch 0."""
    all_axes = [("epoch", "Epochs"), ("samples", "Samples"), ("seconds", "Seconds")]
    past = [part.at["epoch"] for line in lines for part in (line.first.history.train, line.first.history.validation)]
    return all_axes if any((epochs > 0).any() for epochs in past) else [*all_axes[1:], all_axes[0]]


def quantities(lines: Sequence[CurveLine]) -> list[tuple[str, str]]:
    """Return (key, title) of what the chart of the loss can show: the loss scale only where there is one."""
    scales = (line.first.history.train.values.get("loss_scale", np.array([])) for line in lines)
    scaled = any((np.isfinite(values) & (values != 1)).any() for values in scales)
    return [("loss", "Loss"), ("lr", "Learning rate"), *([("loss_scale", "Loss scale")] if scaled else [])]


def metrics(runs: RunSet, lines: Sequence[CurveLine]) -> list[str]:
    """Return the validation metrics, the deciding one first."""
    names = dict.fromkeys(name for line in lines for name in line.first.history.validation.values)
    return sorted(names, key=lambda name: name != runs.metric)


def undrawn(runs: RunSet, lines: Sequence[CurveLine]) -> str:
    """Return a sentence on the runs that have no line; empty if all have one."""
    hidden = len(runs.runs) - sum(len(line.runs) for line in lines)
    if not hidden or not lines:
        return ""
    hidden_text = f"{plural(hidden, 'other run')} {'is' if hidden == 1 else 'are'}"
    return f"The figures show only the best {plural(len(lines), 'line')}; {hidden_text} in the table of all runs."
