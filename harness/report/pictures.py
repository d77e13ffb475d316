"""Figures for a paper: a PNG each of what the page has, drawn with matplotlib, which needs no browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.report import charts_runs, charts_settings, lines, mistakes, scaling, words
from harness.report.charts import Chart
from harness.report.lines import Line
from harness.report.scaling import Ladder, Target
from harness.report.study import Study

# The page's palette, in light.
_INK, _QUIET, _GRID = "#1b2130", "#5b6477", "#e8ebf0"
_COLORS = ("#2166ac", "#d1603d", "#2a8a5d", "#8e5aa8", "#b58900", "#1b9aaa", "#b03a6b", "#5c6b7a")
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "cross": "P", "x": "X",
            "triangle-down": "v", "star": "*"}  # fmt: skip
_HATCHES = ("", "//", "xx", "..", "\\\\", "--")
_DPI = 200
Draw = Callable[[Any], None]  # onto axes


def write(study: Study, target: Target | None, out: Path) -> list[Path]:
    """``OUT-NAME.png`` for each figure there are data for; the files written. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "figures need matplotlib, which is not installed",
            where="--format png",
            hint="pip install 'apex-harness[plot]', or --format html",
        ) from None
    written = []
    for name, size, draw in _figures(study, target):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, colors=_INK)
        axes.grid(axis="y", color=_GRID)
        axes.set_axisbelow(True)
        draw(axes)
        path = out.with_name(f"{out.stem}-{name}.png")
        try:
            figure.savefig(path, dpi=_DPI)
        except OSError as error:
            raise ConfigError(
                f"it cannot be written: {error.strerror}", where=str(path), hint="name another -o"
            ) from None
        written.append(path)
    if not written:
        raise ConfigError("no run has anything to draw yet", where="--format png", hint="train for an epoch first")
    return written


def _figures(study: Study, target: Target | None) -> list[tuple[str, tuple[float, float], Draw]]:
    """(name, inches, what draws it) of every figure that there are data for."""
    drawn = lines.choose(study)
    ladders = scaling.ladders(study, target.value if target else None)
    found: list[tuple[str, tuple[float, float], Draw]] = []
    if any(line.first.history.train.values for line in drawn):
        found.append(("loss", (5.2, 3.6), lambda axes: _curves(axes, drawn, "train", "loss", "training loss")))
    if (metric := study.metric) and any(metric in line.first.history.held_out.values for line in drawn):
        named = words.metric(metric)
        found.append(("held-out", (5.2, 3.6), lambda axes: _curves(axes, drawn, "held_out", metric, named)))
    if ladders:
        found.append(("speed-up", (4.2, 3.4), lambda axes: _speed_up(axes, ladders)))
        if target and any(point.seconds for ladder in ladders for point in ladder.points):
            found.append(("time-to-target", (5.2, 3.4), lambda axes: _times(axes, ladders, study, target)))
    for chart in charts_settings.heat_maps(study):
        found.append((chart.key, (4.2, 3.2), lambda axes, chart=chart: _map(axes, chart)))  # type: ignore[misc]
    if time := charts_runs.where_time_went(drawn):
        found.append(("time", (6.4, 1.4 + 0.34 * len(time.rows)), lambda axes: _shares(axes, time)))
    best = next((made for run in study.ranked if (made := mistakes.confusion(run))), None)
    if best and (matrix := charts_runs.confusion(best, "")):
        found.append(("confusion", (4.6, 4.6), lambda axes: _map(axes, matrix)))
    return found


def _curves(axes: Any, drawn: Sequence[Line], part: str, name: str, title: str) -> None:
    """Along epochs; the mean of several seeds in its band."""
    for line in drawn:
        points = lines.points(line)[part]
        if name in points["values"]:
            x, y = points["at"]["epoch"], [float("nan") if v is None else v for v in points["values"][name]]
            marker = _MARKERS[line.symbol] if part == "held_out" and len(x) <= 30 or len(x) == 1 else None
            style = {"color": _COLORS[line.color], "linestyle": _DASHES[line.dash], "linewidth": 1.3}
            axes.plot(x, y, label=line.label, marker=marker, markersize=3 if len(x) > 1 else 6, **style)
            if "low" in points and name in points["low"]:
                axes.fill_between(x, points["low"][name], points["high"][name], color=_COLORS[line.color], alpha=0.15)
    axes.set_xlabel("epochs", fontsize=9)
    axes.set_ylabel(title, fontsize=9)
    if len(drawn) > 1:
        axes.legend(fontsize=6.5, frameon=False, ncols=1 + len(drawn) // 9)


def _speed_up(axes: Any, ladders: Sequence[Ladder]) -> None:
    worlds = sorted({point.world for ladder in ladders for point in ladder.points})
    for base in sorted({ladder.points[0].world for ladder in ladders}):
        mine = [world for world in worlds if world >= base]
        axes.plot(mine, [world / base for world in mine], color=_QUIET, linestyle=":", label="ideal")
    for place, ladder in enumerate(ladders):
        known = [(point.world, point.speed_up) for point in ladder.points if point.speed_up]
        marker = list(_MARKERS.values())[place % len(_MARKERS)]
        color = _COLORS[place % len(_COLORS)]
        axes.plot(*zip(*known, strict=True), marker=marker, markersize=5, color=color, label=ladder.label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks", fontsize=9)
    axes.set_ylabel("speed-up", fontsize=9)
    axes.legend(fontsize=6.5, frameon=False)


def _times(axes: Any, ladders: Sequence[Ladder], study: Study, target: Target) -> None:
    """Bars of seconds by recipe and world size, with the ideal as a mark on each."""
    worlds = sorted({point.world for ladder in ladders for point in ladder.points})
    width = 0.8 / len(worlds)
    for place, ladder in enumerate(ladders):
        base = next((point for point in ladder.points if point.seconds), None)
        for point in ladder.points:
            nth = worlds.index(point.world)
            x = place + (nth - (len(worlds) - 1) / 2) * width
            label = words.plural(point.world, "rank") if place == 0 else None
            axes.bar(x, point.seconds or 0.0, width * 0.9, color=_COLORS[nth % 8], hatch=_HATCHES[nth % 6], label=label,
                     edgecolor="white")  # fmt: skip
            if base and base.seconds:
                ideal = base.seconds * base.world / point.world
                side = width * 0.45
                axes.plot([x - side, x + side], [ideal, ideal], color=_INK, linewidth=1.4)
    axes.set_xticks(range(len(ladders)), [ladder.label.replace(" · ", "\n") for ladder in ladders], fontsize=7)
    sign = "≥" if study.direction == "max" else "≤"
    axes.set_ylabel(f"seconds to {words.metric(study.metric)} {sign} {words.number(target.value)}", fontsize=8)
    axes.legend(fontsize=7, frameon=False, title="black: ideal", title_fontsize=7)


def _map(axes: Any, chart: Chart) -> None:
    """A heat map of the page, with its numbers."""
    heat = chart.data[0]
    grid = [[float("nan") if value is None else value for value in line] for line in heat["z"]]
    axes.imshow(grid, cmap="Blues_r" if heat.get("reversescale") else "Blues", aspect="auto",
                origin="upper" if chart.key == "confusion" else "lower")  # fmt: skip
    axes.grid(visible=False)
    low, high = min(v for line in grid for v in line if v == v), max(v for line in grid for v in line if v == v)
    for row, line in enumerate(heat.get("text", [])):
        for column, text in enumerate(line):
            share = (grid[row][column] - low) / (high - low or 1.0)
            dark = share < 0.3 if heat.get("reversescale") else share > 0.7  # both inks have contrast there
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if dark else _INK)
    axes.set_xticks(range(len(heat["x"])), heat["x"], fontsize=7)
    axes.set_yticks(range(len(heat["y"])), heat["y"], fontsize=7)
    axes.set_xlabel(chart.layout["xaxis"]["title"]["text"], fontsize=9)
    axes.set_ylabel(chart.layout["yaxis"]["title"]["text"], fontsize=9)
    axes.set_title(chart.title, fontsize=9, loc="left", color=_INK)


def _shares(axes: Any, chart: Chart) -> None:
    left = [0.0] * len(chart.rows)
    for place, bar in enumerate(chart.data):
        axes.barh(range(len(left)), bar["x"], left=left, label=bar["name"], color=_COLORS[place % 8],
                  hatch=_HATCHES[place % 6], edgecolor="white")  # fmt: skip
        left = [before + share for before, share in zip(left, bar["x"], strict=True)]
    axes.set_yticks(range(len(left)), [row[0].replace(" · ", ", ") for row in chart.rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of training time", fontsize=9)
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0))
