"""Figures of what more ranks bring: time to a target, speed-up and efficiency, each with the ideal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.report import words
from harness.report.charts import MAX_BARS, Chart, Trace, plain, wrapped
from harness.report.lines import NUM_COLORS, SYMBOLS
from harness.report.scaling import Ladder, Point, Target, reached
from harness.report.study import Study

MAX_LADDERS = 12


def time_to_target(study: Study, target: Target, ladders: Sequence[Ladder]) -> Chart | None:
    """Seconds to the target: by recipe and world size beside the ideal, or else by run."""
    sign = "≥" if study.direction == "max" else "≤"
    title = f"Time to {words.metric(study.metric)} {sign} {words.number(target.value)}"
    shown = [ladder for ladder in ladders if any(point.seconds for point in ladder.points)][:MAX_LADDERS]
    return _time_by_world(title, shown) if shown else _time_by_run(title, study, target)


def _time_by_world(title: str, ladders: Sequence[Ladder]) -> Chart:
    groups: list[str] = []
    ranks: list[str] = []
    seconds: list[float | None] = []
    rows: list[list[str]] = []
    data: list[Trace] = []
    for ladder in ladders:
        base = next((point for point in ladder.points if point.seconds), None)
        first = len(groups)
        ideals = [base.seconds * base.world / point.world if base and base.seconds else None for point in ladder.points]
        for point, ideal in zip(ladder.points, ideals, strict=True):
            groups.append(wrapped(ladder.label))
            ranks.append(words.plural(point.world, "rank"))
            seconds.append(point.seconds)
            rows.append(
                [ladder.label, str(point.world), words.duration(point.seconds) if point.seconds else "not reached",
                 words.duration(ideal), words.times(point.sooner)]
            )  # fmt: skip
        data.append(
            {"type": "scatter", "mode": "lines+markers", "x": [groups[first:], ranks[first:]], "y": ideals,
             "name": "ideal 1/N", "line": {"color": "@ink", "dash": "dot", "width": 2},
             "marker": {"color": "@ink", "symbol": "diamond-open", "size": 8}, "showlegend": not data,
             "hovertemplate": "%{y:.1f} s would be ideal<extra></extra>"}
        )  # fmt: skip
    bars = {
        "type": "bar", "x": [groups, ranks], "y": seconds, "name": "measured", "marker": {"color": "@c0"},
        "text": [words.duration(value) if value else "" for value in seconds], "textposition": "inside",
        "insidetextanchor": "start", "textangle": 0, "constraintext": "none",
        "hovertemplate": "%{x}: %{y:.1f} s<extra></extra>",
    }  # fmt: skip
    layout: dict[str, Any] = {
        "yaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"},
        "bargap": 0.25,
        "showlegend": True,
    }
    summary = f"{title}: bars of seconds by number of ranks for {words.plural(len(ladders), 'recipe')}, with the ideal."
    header = ["recipe", "ranks", "seconds to target", "ideal", "times sooner"]
    narrow, wide = 88 * len(seconds), 170 * len(seconds) + 120
    figure = [bars, *data]
    return Chart("time-to-target", title, summary, figure, layout, header, rows, min_width=narrow, max_width=wide)


def _time_by_run(title: str, study: Study, target: Target) -> Chart | None:
    when = [(run, reached(run, target.value, study.direction)) for run in study.runs]
    found = sorted(((run, at) for run, at in when if at), key=lambda pair: pair[1].seconds)
    missed = [run for run, at in when if at is None and run.best is not None]
    if not found:
        return None
    rows = [
        [run.label, words.duration(at.seconds), words.number(at.epoch), words.count(at.samples)] for run, at in found
    ]
    rows += [[run.label, "not reached", words.NOTHING, words.NOTHING] for run in missed]
    shown = found[:MAX_BARS][::-1]
    bars = {
        "type": "bar", "orientation": "h", "y": [plain(run.label) for run, _ in shown],
        "x": [at.seconds for _, at in shown], "marker": {"color": "@c0"}, "textposition": "auto", "textangle": 0,
        "text": [words.duration(at.seconds) for _, at in shown], "hovertemplate": "%{y}: %{x:.1f} s<extra></extra>",
    }  # fmt: skip
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"},
        "yaxis": {"type": "category"},
    }
    summary = f"{title}: {words.plural(len(found), 'run')} reached it, the fastest in {rows[0][1]}."
    header = ["run", "seconds", "epoch", "samples"]
    return Chart("time-to-target", title, summary, [bars], layout, header, rows, height=90 + 40 * len(shown))


def speed_up(ladders: Sequence[Ladder]) -> list[Chart]:
    """Speed-up and efficiency by world size, with the ideal; nothing where no recipe has two."""
    shown = [ladder for ladder in ladders if sum(point.speed_up is not None for point in ladder.points) > 1]
    shown = shown[:MAX_LADDERS]
    if not shown:
        return []
    header = ["recipe", "ranks", "rows/s", "speed-up", "efficiency"]
    rows = [
        [ladder.label, str(point.world), words.count(point.rows_per_s), words.times(point.speed_up),
         words.percent(point.efficiency)]
        for ladder in shown for point in ladder.points
    ]  # fmt: skip
    charts = []
    for key, title, what, told in (
        ("speed-up", "Speed-up of training", "times as many rows a second", words.times),
        ("efficiency", "Efficiency", "share of the ideal speed-up", words.percent),
    ):
        data = [*_ideals(shown, key), *(_climb(ladder, key, place) for place, ladder in enumerate(shown))]
        worlds = sorted({point.world for ladder in shown for point in ladder.points})
        ticks = {"type": "log", "tickvals": worlds, "ticktext": [str(world) for world in worlds]}
        layout: dict[str, Any] = {
            "xaxis": {"title": {"text": "ranks"}, **ticks},
            "yaxis": {"title": {"text": what}, "rangemode": "tozero"},
            "showlegend": True,
        }
        if key == "efficiency":
            layout["yaxis"]["tickformat"] = ".0%"
        tops = [value for ladder in shown if (value := _measure(ladder.points[-1], key)) is not None]
        summary = f"{title} at the largest number of ranks: "
        summary += f"{told(min(tops))} to {told(max(tops))}." if tops else "not known."
        charts.append(Chart(key, title, summary, data, layout, header, rows, height=320 + 22 * len(shown)))
    return charts


def _measure(point: Point, key: str) -> float | None:
    return point.speed_up if key == "speed-up" else point.efficiency


def _ideals(ladders: Sequence[Ladder], key: str) -> list[Trace]:
    """A dotted line for each smallest world size that a recipe starts from."""
    traces: list[Trace] = []
    for base in sorted({ladder.points[0].world for ladder in ladders}):
        own = [ladder for ladder in ladders if ladder.points[0].world == base]
        worlds = sorted({point.world for ladder in own for point in ladder.points})
        ideal = [world / base if key == "speed-up" else 1.0 for world in worlds]
        traces.append(
            {"type": "scatter", "mode": "lines", "x": worlds, "y": ideal, "name": "ideal", "hoverinfo": "skip",
             "line": {"color": "@ink", "dash": "dot", "width": 2}, "showlegend": not traces}
        )  # fmt: skip
    return traces


def _climb(ladder: Ladder, key: str, place: int) -> Trace:
    known = [point for point in ladder.points if point.speed_up is not None]
    digits = "%{y:.2f}×" if key == "speed-up" else "%{y:.1%}"
    return {
        "type": "scatter", "mode": "lines+markers", "x": [point.world for point in known],
        "y": [_measure(point, key) for point in known], "name": plain(ladder.label),
        "line": {"color": f"@c{place % NUM_COLORS}", "width": 2},
        "marker": {"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 9}, "hovertemplate": f"%{{x}} ranks: {digits}",
    }  # fmt: skip
