"""The figures of a report, as plotly figures in plain data.

Colors are names such as "@c0", which stand for a color of the page's light or dark palette. Text from files is escaped,
because plotly reads some of it as markup.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.errors import plural
from harness.runs.metrics_table import PHASES
from harness.tools.report import formatting
from harness.tools.report.curves import CurveLine
from harness.tools.report.mistakes import Confusion

MAX_CLASSES = 60  # of a matrix that is drawn
Trace = dict[str, Any]
PATTERNS = ("", "/", "x", ".", "\\", "-")  # so that bars can be told apart without color


@dataclass(frozen=True)
class Chart:
    """``summary`` describes the figure in a sentence. Sizes in CSS pixels. The page draws those without ``data``."""

    key: str
    title: str
    summary: str
    data: list[Trace] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 360
    min_width: int = 0
    """Below this the figure scrolls."""
    max_width: int = 0
    """0: unlimited."""


def plain(text: Any) -> str:
    """Text that plotly shows as it is."""
    return html.escape(str(text), quote=False)


def where_time_went(lines: Sequence[CurveLine]) -> Chart | None:
    """Stacked bars of the shares of training time."""
    measured = [line for line in lines if line.first.history.shares]
    if not measured:
        return None
    shares = []
    for line in measured:
        of_runs = [run.history.shares for run in line.runs if run.history.shares]
        shares.append({phase: statistics.fmean(share.get(phase, 0.0) for share in of_runs) for phase in PHASES})
    data: list[Trace] = [
        {"type": "bar", "orientation": "h", "name": PHASES[phase], "y": [plain(line.label) for line in measured],
          "x": [share[phase] for share in shares], "marker": _filled(number), "textposition": "inside",
          "text": [f"{share[phase]:.0%}" if share[phase] >= 0.045 else "" for share in shares],
          "insidetextanchor": "middle", "textangle": 0, "hovertemplate": "%{x:.1%}"}
        for number, phase in enumerate(PHASES)
    ]  # fmt: skip
    layout = {
        "barmode": "stack",
        "xaxis": {"tickformat": ".0%", "range": [0, 1.0005], "dtick": 0.2, "title": {"text": "share of training time"}},
        "yaxis": {"autorange": "reversed", "type": "category", "ticks": "outside", "tickcolor": "rgba(0,0,0,0)"},
        "showlegend": True,
        "bargap": 0.3,
    }
    largest = max(PHASES, key=lambda phase: shares[0][phase])
    share = formatting.percent(shares[0][largest])
    summary = f"The largest share of the training time of {measured[0].label} is {PHASES[largest]}: {share}."
    return Chart("time", "Where training time went", summary, data, layout, height=110 + 42 * len(measured))


def _filled(number: int) -> dict[str, Any]:
    """Return a color and a pattern."""
    color = f"@c{number}"
    pattern: dict[str, Any] = {"shape": PATTERNS[number % len(PATTERNS)], "bgcolor": color, "fgcolor": "@surface"}
    pattern |= {"fgopacity": 0.4, "size": 7, "solidity": 0.12}
    return {"color": color, "pattern": pattern, "line": {"color": "@surface", "width": 1}}


def confusion(matrix: Confusion, label: str) -> Chart | None:
    """Return the matrix, each row colored by its share of the true class; None if it has too many classes to be
    legible."""
    if len(matrix.classes) > MAX_CLASSES:
        return None
    totals = [sum(line) or 1 for line in matrix.counts]
    shares = [[count / total for count in line] for line, total in zip(matrix.counts, totals, strict=True)]
    names = [plain(name) for name in matrix.classes]
    heat: Trace = {
        "type": "heatmap", "z": shares, "x": names, "y": names, "customdata": matrix.counts, "zmin": 0, "zmax": 1,
        "colorscale": [[0, "@heat0"], [1, "@heat1"]], "showscale": False, "xgap": 1, "ygap": 1,
        "hovertemplate": "label %{y}, prediction %{x}: %{customdata}<extra></extra>",
    }  # fmt: skip
    if len(names) <= 20:
        heat |= {"text": [[str(n) if n else "" for n in line] for line in matrix.counts], "texttemplate": "%{text}",
                 "textfont": {"color": "@ink"}}  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "prediction"}, "type": "category", "showgrid": False, "side": "top"},
        "yaxis": {"title": {"text": "label"}, "type": "category", "autorange": "reversed", "showgrid": False},
        "margin": {"b": 12},
    }
    summary = f"Confusion matrix of {label}: {len(names)} classes, {plural(sum(map(sum, matrix.counts)), 'row')}."
    height, min_width = 130 + 30 * min(len(names), 20), 28 * len(names) if len(names) > 12 else 0
    return Chart("confusion", "Confusion matrix", summary, [heat], layout, height, min_width, max_width=760)
