"""The sections of a report that have figures or tables, and the reasons why others are left out.

Figures are plotly figures in plain data. Colors are names such as "@c0", which stand for a color of the page's light or
dark palette. Text from files is escaped, because plotly reads some of it as markup.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.errors import plural
from harness.runs import ownership
from harness.runs.metrics_table import PHASES
from harness.tools.report import formatting, mistakes, tables
from harness.tools.report.curves import CurveLine
from harness.tools.report.mistakes import MAX_CLASSES, Confusion, Mistake
from harness.tools.report.run_set import RunSet

MAX_BARS = 24
Trace = dict[str, Any]
PATTERNS = ("", "/", "x", ".", "\\", "-")  # so that bars can be told apart without color
_PHASE_NAMES = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "reduce": "communication",
    "optimizer": "optimizer",
    "host": "host",
}


@dataclass(frozen=True)
class Chart:
    """``summary`` describes the figure in a sentence. Sizes in CSS pixels."""

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


@dataclass(frozen=True)
class ReportSection:
    """A section: notes above its figures, and a table below."""

    key: str
    title: str
    charts: list[Chart]
    notes: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    caption: str = ""
    mistakes: list[Mistake] = field(default_factory=list)


def choose(runs: RunSet, lines: Sequence[CurveLine]) -> tuple[list[Chart], list[ReportSection], list[str]]:
    """Return (charts of the learning curves, the sections after them, reasons why others are left out).

    The curves' charts have no ``data``: the page draws them from the lines, along the axis that the reader chooses.
    """
    curves, left_out = _curves(lines)
    sections = [_speed_up(runs, left_out), _seeds(runs), _time(lines, left_out), _mistakes(runs, left_out)]
    return curves, [section for section in sections if section], left_out


def _curves(lines: Sequence[CurveLine]) -> tuple[list[Chart], list[str]]:
    left_out: list[str] = []
    curves = []
    amount = plural(len(lines), "line")
    if any(line.first.history.validation.values for line in lines):
        curves.append(Chart("validation", "Validation", f"Validation metrics during training, {amount}."))
    elif lines:
        left_out.append("Validation curves: no run has an evaluation yet.")
    if any(len(line.first.history.train) for line in lines):
        curves.append(Chart("training", "Training", f"Training loss, learning rate or loss scale, {amount}."))
    return curves, left_out


def metrics(runs: RunSet, lines: Sequence[CurveLine]) -> list[str]:
    """Validation metrics, the deciding one first."""
    names = dict.fromkeys(name for line in lines for name in line.first.history.validation.values)
    return sorted(names, key=lambda name: name != runs.metric)


def undrawn(runs: RunSet, lines: Sequence[CurveLine]) -> str:
    hidden = len(runs.runs) - sum(len(line.runs) for line in lines)
    if not hidden or not lines:
        return ""
    others = f"{plural(hidden, 'other run')} {'is' if hidden == 1 else 'are'}"
    return f"The figures show only the best {plural(len(lines), 'line')}; {others} in the table of all runs."


def _speed_up(runs: RunSet, left_out: list[str]) -> ReportSection | None:
    header, rows = tables.speed_up_rows(runs)
    if not rows:
        left_out.append("Speed-up: no two finished runs differ only in their number of ranks.")
        return None
    notes = [
        "Compares runs with the same settings, global batch and kind of device, and different numbers of ranks. Speed "
        "is in rows per second of training, excluding evaluations. The ideal is proportional to the number of ranks."
    ]
    return ReportSection("speed", "Speed-up", [], notes, header, rows, "Compared runs")


def _seeds(runs: RunSet) -> ReportSection | None:
    header, rows = tables.seeds_rows(runs)
    if not rows:
        return None
    notes = [f"Runs that differ only by seed: {formatting.metric(runs.metric)}, ± sample standard deviation."]
    return ReportSection("seeds", "Seeds", [], notes, header, rows, "Best values over seeds")


def _time(lines: Sequence[CurveLine], left_out: list[str]) -> ReportSection | None:
    chart = where_time_went(lines)
    if chart is None:
        left_out.append("Where the time went: the logs have no times.")
        return None
    notes = ["Shares of the training time over all ranks, excluding evaluations."]
    return ReportSection("time", "Time", [chart], notes)


def _mistakes(runs: RunSet, left_out: list[str]) -> ReportSection | None:
    ways = ((run, mistakes.confusion(run), *mistakes.by_name(run)) for run in runs.ranked)
    run, found, header, rows = next((each for each in ways if each[1] or each[2]), (None, None, [], []))
    if run is None:
        left_out.append("Mistakes: no run has a confusion matrix, or metrics by label or column.")
        return None
    chart = confusion(found, run.label) if found else None
    allowed = runs.trust or ownership.is_own(run.record.path)
    shown, wrong, num_rows = mistakes.most_confident(run, with_images=allowed)
    if shown and not allowed:
        left_out.append(
            "Images of mistakes: you did not start this run on this machine, so its files may point to any image on "
            "this disk. To show the images, add --trust."
        )
    notes = [f"Run: {run.label}. {_origin(found, num_rows > 0, run.record.state == 'finished')}"]
    if num_rows and header[:1] != ["column"]:
        notes.append(f"Wrong predictions: {formatting.count(wrong)} of {formatting.count(num_rows)} validation rows.")
    caption = f"By {header[0]}, the worst first" if header else ""
    if found and not header:
        rows = [[true, predicted, str(count)] for true, predicted, count in found.pairs]
        header, caption = ["label", "prediction", "rows"] if rows else [], "Most frequent errors"
    return ReportSection("mistakes", "Mistakes", [chart] if chart else [], notes, header, rows, caption, shown)


def _origin(found: Confusion | None, is_listed: bool, is_finished: bool) -> str:
    """Return the weights behind the matrix or the metrics, and behind the list."""
    best = "its best weights" + ("" if is_finished else " as of the last time it finished")
    if found and found.of_best:
        return f"The matrix and the list are from {best}."
    what = "matrix is" if found else "metrics are"
    return f"The {what} from its newest evaluation" + (f", the list from {best}." if is_listed else ".")


def all_charts(sections: Sequence[ReportSection]) -> Iterator[Chart]:
    for section in sections:
        yield from section.charts


# The figures


def plain(text: Any) -> str:
    """Text that plotly shows as it is."""
    return html.escape(str(text), quote=False)


def where_time_went(lines: Sequence[CurveLine]) -> Chart | None:
    """Stacked bars of the shares of training time."""
    shown = [line for line in lines if line.first.history.shares][:MAX_BARS]
    if not shown:
        return None
    shares = []
    for line in shown:
        of_runs = [run.history.shares for run in line.runs if run.history.shares]
        shares.append({phase: statistics.fmean(share.get(phase, 0.0) for share in of_runs) for phase in PHASES})
    data: list[Trace] = [
        {"type": "bar", "orientation": "h", "name": _PHASE_NAMES[phase], "y": [plain(line.label) for line in shown],
          "x": [share[phase] for share in shares], "marker": _filled(place), "textposition": "inside",
          "text": [f"{share[phase]:.0%}" if share[phase] >= 0.045 else "" for share in shares],
          "insidetextanchor": "middle", "textangle": 0, "hovertemplate": "%{x:.1%}"}
        for place, phase in enumerate(PHASES)
    ]  # fmt: skip
    layout = {
        "barmode": "stack",
        "xaxis": {"tickformat": ".0%", "range": [0, 1.0005], "dtick": 0.2, "title": {"text": "share of training time"}},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "showlegend": True,
        "bargap": 0.3,
    }
    largest = max(PHASES, key=lambda phase: shares[0][phase])
    share = formatting.percent(shares[0][largest])
    summary = f"The largest share of the training time of {shown[0].label} is {_PHASE_NAMES[largest]}: {share}."
    return Chart("time", "Where training time went", summary, data, layout, height=110 + 42 * len(shown))


def _filled(place: int) -> dict[str, Any]:
    """Return a color and a pattern."""
    color = f"@c{place}"
    pattern: dict[str, Any] = {"shape": PATTERNS[place % len(PATTERNS)], "bgcolor": color, "fgcolor": "@surface"}
    pattern |= {"fgopacity": 0.4, "size": 7, "solidity": 0.12}
    return {"color": color, "pattern": pattern, "line": {"color": "@surface", "width": 1}}


def confusion(found: Confusion, label: str) -> Chart | None:
    """Return the matrix, each row colored by its share of the true class; None if it has too many classes to be
    legible."""
    if len(found.classes) > MAX_CLASSES:
        return None
    totals = [sum(line) or 1 for line in found.counts]
    shares = [[count / total for count in line] for line, total in zip(found.counts, totals, strict=True)]
    names = [plain(name) for name in found.classes]
    heat: Trace = {
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
    summary = f"Confusion matrix of {label}: {len(names)} classes, {plural(sum(map(sum, found.counts)), 'row')}."
    if found.pairs:
        true, predicted, count = found.pairs[0]
        summary += f" The most frequent error: {true} predicted as {predicted} ({plural(count, 'time')})."
    height, min_width = 160 + 30 * min(len(names), 20), 28 * len(names) if len(names) > 12 else 0
    return Chart("confusion", "Confusion matrix", summary, [heat], layout, height, min_width, max_width=760)
