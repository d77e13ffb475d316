"""Figures as plotly figures in plain data: shares of time, confusion matrix, scaling with the number of ranks.

Colors are names such as "@c0", which stand for a color of the page's light or dark palette. Text from files is escaped,
because plotly reads some of it as markup.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import plural
from harness.tools.report import formatting
from harness.tools.report.curves import NUM_COLORS, SYMBOLS, CurveLine
from harness.tools.report.history import PHASES
from harness.tools.report.mistakes import MAX_CLASSES, Confusion
from harness.tools.report.run_set import RunSet
from harness.tools.report.scaling import ScalingPoint, ScalingSeries, Target, reached

MAX_BARS = 24
MAX_SERIES = 12  # of scaling
Trace = dict[str, Any]
_IDEAL = {"color": "@ink", "dash": "dot", "width": 2}
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
    """``summary`` describes the figure in a sentence; ``header`` and ``rows`` are its numbers. Sizes in CSS pixels."""

    key: str
    title: str
    summary: str
    data: list[Trace]
    layout: dict[str, Any]
    header: list[str]
    rows: list[list[str]]
    height: int = 340
    min_width: int = 0  # below this the figure scrolls
    max_width: int = 0  # 0: unlimited


def plain(text: Any) -> str:
    """Text that plotly shows as it is."""
    return html.escape(str(text), quote=False)


def wrapped(label: str) -> str:
    """A label with one setting per line."""
    return "<br>".join(plain(part) for part in label.split(" · "))


def where_time_went(lines: Sequence[CurveLine]) -> Chart | None:
    """Stacked bars of the shares of training time."""
    shown = [line for line in lines if line.first.history.shares][:MAX_BARS]
    if not shown:
        return None
    shares = []
    for line in shown:
        of_runs = [run.history.shares for run in line.group.runs if run.history.shares]
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
    rows = [
        [line.label, *(formatting.percent(share[phase]) for phase in PHASES)]
        for line, share in zip(shown, shares, strict=True)
    ]
    largest = max(PHASES, key=lambda phase: shares[0][phase])
    share = formatting.percent(shares[0][largest])
    summary = f"The largest share of the training time of {shown[0].label} is {_PHASE_NAMES[largest]}: {share}."
    header = ["run", *(_PHASE_NAMES[phase] for phase in PHASES)]
    height = 110 + 42 * len(shown)
    return Chart("time", "Where training time went", summary, data, layout, header, rows, height=height)


def _filled(place: int) -> dict[str, Any]:
    """A color and a pattern."""
    color = f"@c{place}"
    pattern: dict[str, Any] = {"shape": PATTERNS[place % len(PATTERNS)], "bgcolor": color, "fgcolor": "@surface"}
    pattern |= {"fgopacity": 0.4, "size": 7, "solidity": 0.12}
    return {"color": color, "pattern": pattern, "line": {"color": "@surface", "width": 1}}


def confusion(found: Confusion, label: str) -> Chart | None:
    """The matrix, each row colored by its share of the true class; None if it has too many classes to be legible."""
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
    rows = [[name, *(str(count) for count in line)] for name, line in zip(found.classes, found.counts, strict=True)]
    return Chart(
        "confusion", "Confusion matrix", summary, [heat], layout, ["label \\ prediction", *found.classes], rows,
        height=160 + 30 * min(len(names), 20), min_width=28 * len(names) if len(names) > 12 else 0, max_width=760,
    )  # fmt: skip


# Scaling with the number of ranks: time to a target, speed-up and efficiency, each with the ideal


def time_to_target(runs: RunSet, target: Target, scaling: Sequence[ScalingSeries]) -> Chart | None:
    """Seconds to the target: by recipe and world size with the ideal, or else by run."""
    title = f"Time to {formatting.metric(runs.metric)} {formatting.at_least(runs.direction, target.value)}"
    shown = [each for each in scaling if any(point.seconds for point in each.points)][:MAX_SERIES]
    return _time_by_world(title, shown) if shown else _time_by_run(title, runs, target)


def _time_by_world(title: str, scaling: Sequence[ScalingSeries]) -> Chart:
    groups: list[str] = []
    ranks: list[str] = []
    seconds: list[float | None] = []
    rows: list[list[str]] = []
    ideal_lines: list[Trace] = []
    for each in scaling:
        base = next((point for point in each.points if point.seconds), None)
        first = len(groups)
        ideals = [base.seconds * base.world / point.world if base and base.seconds else None for point in each.points]
        for point, ideal in zip(each.points, ideals, strict=True):
            groups.append(wrapped(each.label))
            ranks.append(plural(point.world, "rank"))
            seconds.append(point.seconds)
            rows.append(
                [each.label, str(point.world), formatting.duration(point.seconds) if point.seconds else "not reached",
                 formatting.duration(ideal), formatting.times(point.times_sooner)]
            )  # fmt: skip
        ideal_lines.append(
            {"type": "scatter", "mode": "lines+markers", "x": [groups[first:], ranks[first:]], "y": ideals,
             "name": "ideal 1/N", "line": _IDEAL, "showlegend": not ideal_lines,
             "marker": {"color": "@ink", "symbol": "diamond-open", "size": 8},
             "hovertemplate": "ideal: %{y:.1f} s<extra></extra>"}
        )  # fmt: skip
    bars: Trace = {
        "type": "bar", "x": [groups, ranks], "y": seconds, "name": "measured", "marker": {"color": "@c0"},
        "text": [formatting.duration(value) if value else "" for value in seconds], "textposition": "inside",
        "insidetextanchor": "start", "textangle": 0, "constraintext": "none",
        "hovertemplate": "%{x}: %{y:.1f} s<extra></extra>",
    }  # fmt: skip
    layout: dict[str, Any] = {
        "yaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"},
        "bargap": 0.25,
        "showlegend": True,
    }
    recipes = plural(len(scaling), "recipe")
    summary = f"{title}: seconds by number of ranks for {recipes}, with the ideal."
    header = ["recipe", "ranks", "seconds to target", "ideal", "speed-up to target"]
    narrow, wide = 88 * len(seconds), 170 * len(seconds) + 120
    data = [bars, *ideal_lines]
    return Chart("time-to-target", title, summary, data, layout, header, rows, min_width=narrow, max_width=wide)


def _time_by_run(title: str, runs: RunSet, target: Target) -> Chart | None:
    when = [(run, reached(run, target.value, runs.direction)) for run in runs.runs]
    found = sorted(((run, at) for run, at in when if at), key=lambda pair: pair[1].seconds)
    missed = [run for run, at in when if at is None and run.best is not None]
    if not found:
        return None
    rows = [
        [run.label, formatting.duration(at.seconds), formatting.number(at.epoch), formatting.count(at.samples)]
        for run, at in found
    ]
    rows += [[run.label, "not reached", formatting.NOTHING, formatting.NOTHING] for run in missed]
    shown = found[:MAX_BARS][::-1]
    bars: Trace = {
        "type": "bar", "orientation": "h", "y": [plain(run.label) for run, _ in shown],
        "x": [at.seconds for _, at in shown], "marker": {"color": "@c0"}, "textposition": "auto", "textangle": 0,
        "text": [formatting.duration(at.seconds) for _, at in shown],
        "hovertemplate": "%{y}: %{x:.1f} s<extra></extra>",
    }  # fmt: skip
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"},
        "yaxis": {"type": "category"},
    }
    summary = f"{title}: {plural(len(found), 'run')} reached it, the fastest in {rows[0][1]}."
    header = ["run", "seconds", "epoch", "samples"]
    return Chart("time-to-target", title, summary, [bars], layout, header, rows, height=90 + 40 * len(shown))


def speed_up(scaling: Sequence[ScalingSeries]) -> list[Chart]:
    """Speed-up and efficiency by world size, with the ideal; empty unless a recipe has two world sizes."""
    shown = [each for each in scaling if sum(point.speed_up is not None for point in each.points) > 1][:MAX_SERIES]
    if not shown:
        return []
    header = ["recipe", "ranks", "rows/s", "speed-up", "efficiency"]
    rows = [
        [each.label, str(point.world), formatting.count(point.rows_per_s), formatting.times(point.speed_up),
         formatting.percent(point.efficiency)]
        for each in shown for point in each.points
    ]  # fmt: skip
    worlds = sorted({point.world for each in shown for point in each.points})
    ticks = {"type": "log", "tickvals": worlds, "ticktext": [str(world) for world in worlds]}
    charts = []
    for key, title, axis, format_value in (
        ("speed-up", "Training speed-up", "speed-up in rows per second", formatting.times),
        ("efficiency", "Efficiency", "share of the ideal speed-up", formatting.percent),
    ):
        layout: dict[str, Any] = {
            "xaxis": {"title": {"text": "ranks"}, **ticks},
            "yaxis": {"title": {"text": axis}, "rangemode": "tozero"},
            "showlegend": True,
        }
        if key == "efficiency":
            layout["yaxis"]["tickformat"] = ".0%"
        tops = [value for each in shown if (value := _measure(each.points[-1], key)) is not None]
        summary = f"{title} at the largest number of ranks: "
        summary += f"{format_value(min(tops))} to {format_value(max(tops))}." if tops else "unknown."
        data = [*_ideal_lines(shown, key), *(_line(each, key, place) for place, each in enumerate(shown))]
        charts.append(Chart(key, title, summary, data, layout, header, rows, height=320 + 22 * len(shown)))
    return charts


def _measure(point: ScalingPoint, key: str) -> float | None:
    return point.speed_up if key == "speed-up" else point.efficiency


def _ideal_lines(scaling: Sequence[ScalingSeries], key: str) -> list[Trace]:
    """A dotted line for each smallest world size of a recipe."""
    traces: list[Trace] = []
    for base in sorted({each.points[0].world for each in scaling}):
        own = [each for each in scaling if each.points[0].world == base]
        worlds = sorted({point.world for each in own for point in each.points})
        ideal = [world / base if key == "speed-up" else 1.0 for world in worlds]
        traces.append(
            {"type": "scatter", "mode": "lines", "x": worlds, "y": ideal, "name": "ideal", "hoverinfo": "skip",
             "line": _IDEAL, "showlegend": not traces}
        )  # fmt: skip
    return traces


def _line(each: ScalingSeries, key: str, place: int) -> Trace:
    known = [point for point in each.points if point.speed_up is not None]
    digits = "%{y:.2f}×" if key == "speed-up" else "%{y:.1%}"
    return {
        "type": "scatter", "mode": "lines+markers", "x": [point.world for point in known],
        "y": [_measure(point, key) for point in known], "name": plain(each.label),
        "line": {"color": f"@c{place % NUM_COLORS}", "width": 2},
        "marker": {"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 9}, "hovertemplate": f"ranks: %{{x}}<br>{digits}",
    }  # fmt: skip
