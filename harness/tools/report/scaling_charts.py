"""Figures of scaling with the number of ranks: time to a target, speed-up and efficiency, each with the ideal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.errors import plural
from harness.tools.report import formatting
from harness.tools.report.charts import MAX_BARS, Chart, Trace, plain, wrapped
from harness.tools.report.curves import NUM_COLORS, SYMBOLS
from harness.tools.report.run_set import RunSet
from harness.tools.report.scaling import ScalingPoint, ScalingSeries, Target, reached

MAX_SERIES = 12
_IDEAL = {"color": "@ink", "dash": "dot", "width": 2}


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
