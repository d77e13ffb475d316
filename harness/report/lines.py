"""The curves of a report: which runs are drawn, and the points of each, along epochs, samples and seconds.

Runs that repeat each other with other seeds are one line, their mean, in the band from the least to the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.report import words
from harness.report.history import AXES, Curve
from harness.report.study import Repeats, Run, Study

MAX_LINES = 24
NUM_COLORS = 8  # of the page's palette
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")
_BAND_POINTS = 100


@dataclass(frozen=True)
class Line:
    """``color`` is a place in the palette; dash and symbol tell lines apart without it."""

    label: str
    repeats: Repeats
    color: int
    dash: str
    symbol: str

    @property
    def first(self) -> Run:
        return self.repeats.runs[0]


def choose(study: Study) -> list[Line]:
    """The best runs, MAX_LINES at most: a color and a symbol for each recipe, a dash for each world size."""
    drawn = [repeats for repeats in study.repeats if any(_has_points(run) for run in repeats.runs)][:MAX_LINES]
    recipes = list(dict.fromkeys(repeats.runs[0].recipe for repeats in drawn))
    worlds = sorted({repeats.runs[0].world or 0 for repeats in drawn})
    found = []
    for repeats in drawn:
        run = repeats.runs[0]
        place = recipes.index(run.recipe)
        dash = worlds.index(run.world or 0) + place // NUM_COLORS
        label = run.label if len(repeats.runs) == 1 else _label(study, repeats)
        found.append(
            Line(label, repeats, place % NUM_COLORS, DASHES[dash % len(DASHES)], SYMBOLS[place % len(SYMBOLS)])
        )
    return found


def _has_points(run: Run) -> bool:
    return bool(len(run.history.train) or len(run.history.held_out))


def _label(study: Study, repeats: Repeats) -> str:
    run = repeats.runs[0]
    several = len({other.world for other in study.runs}) > 1
    ranks = f" · {words.plural(run.world, 'rank')}" if several and run.world else ""
    return f"{study.setting(run)}{ranks} · mean of {len(repeats.runs)} seeds"


def points(line: Line) -> dict[str, Any]:
    """The line for the page: {train, held_out: {at: {axis: [...]}, values, low, high: {name: [...]}}}."""
    found: dict[str, Any] = {"label": line.label, "color": line.color, "dash": line.dash, "symbol": line.symbol}
    for part in ("train", "held_out"):
        curves = [getattr(run.history, part) for run in line.repeats.runs]
        found[part] = _band([curve for curve in curves if len(curve)])
    return found


def _band(curves: Sequence[Curve]) -> dict[str, Any]:
    if len(curves) < 2:
        curve = curves[0] if curves else None
        at = {axis: rounded(curve.at[axis]) for axis in AXES} if curve else {}
        return {"at": at, "values": {name: rounded(values) for name, values in curve.values.items()} if curve else {}}
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
    """Six significant digits, which no screen shows; null where there is no number."""
    return [None if value != value or abs(value) == np.inf else float(f"{value:.6g}") for value in values.tolist()]
