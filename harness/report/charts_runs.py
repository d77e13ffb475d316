"""Figures of what happened in runs: where their time went, and what a classifier takes for what."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from harness.report import words
from harness.report.charts import MAX_BARS, Chart, plain
from harness.report.history import PHASES
from harness.report.lines import Line
from harness.report.mistakes import MAX_CLASSES, Confusion

_PATTERNS = ("", "/", "x", ".", "\\", "-")  # for those who do not see the colors
_PHASE_NAMES = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "reduce": "communication",
    "optimizer": "optimizer",
    "host": "host",
    "rest": "everything else",
}


def where_time_went(lines: Sequence[Line]) -> Chart | None:
    """Stacked bars of the shares of training time."""
    shown = [line for line in lines if line.first.history.shares][:MAX_BARS]
    if not shown:
        return None
    told = {phase for line in shown for phase in line.first.history.shares}
    phases = [phase for phase in (*PHASES, "rest") if phase in told]
    shares = []
    for line in shown:
        told_by = [run.history.shares for run in line.repeats.runs if run.history.shares]
        shares.append({phase: statistics.fmean(share.get(phase, 0.0) for share in told_by) for phase in phases})
    data = [
        {"type": "bar", "orientation": "h", "name": _PHASE_NAMES[phase], "y": [plain(line.label) for line in shown],
         "x": [share[phase] for share in shares], "marker": _filled(place, phase), "textposition": "inside",
         "text": [f"{share[phase]:.0%}" if share[phase] >= 0.045 else "" for share in shares],
         "insidetextanchor": "middle", "textangle": 0, "hovertemplate": "%{x:.1%}"}
        for place, phase in enumerate(phases)
    ]  # fmt: skip
    layout = {
        "barmode": "stack",
        "xaxis": {"tickformat": ".0%", "range": [0, 1.0005], "dtick": 0.2, "title": {"text": "share of training time"}},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "showlegend": True,
        "bargap": 0.3,
    }
    rows = [
        [line.label, *(words.percent(share[phase]) for phase in phases)]
        for line, share in zip(shown, shares, strict=True)
    ]
    largest = max(phases, key=lambda phase: shares[0][phase])
    summary = f"Of the first run's training time, {words.percent(shares[0][largest])} is {_PHASE_NAMES[largest]}."
    header = ["run", *(_PHASE_NAMES[phase] for phase in phases)]
    height = 110 + 42 * len(shown)
    return Chart("time", "Where training time went", summary, data, layout, header, rows, height=height)


def _filled(place: int, phase: str) -> dict[str, Any]:
    """A color and a pattern."""
    color = "@c7" if phase == "rest" else f"@c{place}"
    pattern: dict[str, Any] = {"shape": _PATTERNS[place % len(_PATTERNS)], "bgcolor": color, "fgcolor": "@surface"}
    pattern |= {"fgopacity": 0.4, "size": 7, "solidity": 0.12}
    return {"color": color, "pattern": pattern, "line": {"color": "@surface", "width": 1}}


def confusion(found: Confusion, metric_run: str) -> Chart | None:
    """The matrix, each row colored by its share of the true class; None for more classes than can be seen."""
    if len(found.classes) > MAX_CLASSES:
        return None
    totals = [sum(line) or 1 for line in found.counts]
    shares = [[count / total for count in line] for line, total in zip(found.counts, totals, strict=True)]
    names = [plain(name) for name in found.classes]
    heat = {
        "type": "heatmap", "z": shares, "x": names, "y": names, "customdata": found.counts, "zmin": 0, "zmax": 1,
        "colorscale": [[0, "@heat0"], [1, "@heat1"]], "showscale": False, "xgap": 1, "ygap": 1,
        "hovertemplate": "label %{y}, prediction %{x}: %{customdata}<extra></extra>",
    }  # fmt: skip
    if len(names) <= 20:
        heat |= {"text": [[str(n) if n else "" for n in line] for line in found.counts], "texttemplate": "%{text}",
                 "textfont": {"color": "@ink"}}  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "prediction"}, "type": "category", "showgrid": False, "side": "top"},
        "yaxis": {"title": {"text": "label"}, "type": "category", "autorange": "reversed", "showgrid": False},
    }
    wrong = sum(count for _, _, count in found.pairs)
    summary = f"Confusion matrix of {metric_run}: {len(names)} classes" + (
        f"; most often {found.pairs[0][0]} is taken for {found.pairs[0][1]} ({found.pairs[0][2]} times)."
        if wrong
        else "."
    )
    rows = [[name, *(str(count) for count in line)] for name, line in zip(found.classes, found.counts, strict=True)]
    height = 160 + 30 * min(len(names), 20)
    width = 28 * len(names) if len(names) > 12 else 0
    header = ["label \\ prediction", *found.classes]
    return Chart(
        "confusion",
        "Confusion matrix",
        summary,
        [heat],
        layout,
        header,
        rows,
        height=height,
        min_width=width,
        max_width=760,
    )
