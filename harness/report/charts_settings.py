"""Figures of what settings did to the metric: batch × learning rate as a map, and each searched setting by itself."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from harness.report import words
from harness.report.charts import MAX_BARS, Chart, plain
from harness.report.study import Run, Study, short

MAX_SLICES = 4
MAX_MAPS = 4  # world sizes


def heat_maps(study: Study) -> list[Chart]:
    """Batch × learning rate, a map for each world size; nothing unless both were varied."""
    charts = []
    worlds = sorted({run.world for run in study.runs if run.world})
    for world in worlds[:4]:
        cells: dict[tuple[int, float], list[float]] = {}
        for run in study.runs:
            if run.world == world and run.best is not None and run.batch and run.lr:
                cells.setdefault((run.batch, run.lr), []).append(run.best)
        batches, rates = sorted({batch for batch, _ in cells}), sorted({rate for _, rate in cells})
        if len(batches) < 2 or len(rates) < 2 or len(batches) * len(rates) > 400:
            continue
        charts.append(_heat_map(study, world, cells, batches, rates, several=len(worlds) > 1))
    return charts


def _heat_map(
    study: Study, world: int, cells: dict[tuple[int, float], list[float]], batches: list[int], rates: list[float],
    several: bool,
) -> Chart:  # fmt: skip
    means = {cell: statistics.fmean(values) for cell, values in cells.items()}
    best = (max if study.direction == "max" else min)(means.values())
    grid = [[means.get((batch, rate)) for batch in batches] for rate in rates]
    text = [
        [("★ " if value == best else "") + words.number(value) if value is not None else "" for value in line]
        for line in grid
    ]
    heat = {
        "type": "heatmap", "z": grid, "x": [words.count(batch) for batch in batches],
        "y": [words.number(rate) for rate in rates], "text": text, "texttemplate": "%{text}",
        "colorscale": [[0, "@heat0"], [1, "@heat1"]], "reversescale": study.direction == "min", "showscale": False,
        "xgap": 3, "ygap": 3, "hovertemplate": "batch %{x}, lr %{y}: %{z}<extra></extra>",
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "global batch"}, "type": "category", "showgrid": False},
        "yaxis": {"title": {"text": "learning rate"}, "type": "category", "showgrid": False},
    }
    rows = [
        [words.count(batch), words.number(rate), words.number(mean), str(len(cells[batch, rate]))]
        for (batch, rate), mean in sorted(means.items())
    ]
    where = f" on {words.plural(world, 'rank')}" if several else ""
    title = f"Best {words.metric(study.metric)}{where}"
    place = next(cell for cell, mean in means.items() if mean == best)
    summary = f"{title}: {words.number(best)} at batch {place[0]}, learning rate {words.number(place[1])}."
    header = ["global batch", "learning rate", words.metric(study.metric), "runs"]
    return Chart(f"heat-{world}", title, summary, [heat], layout, header, rows, height=140 + 52 * len(rates))


def slices(study: Study) -> list[Chart]:
    """What each searched setting did to the metric, a point a run; nothing where there are few values."""
    charts = []
    known = [run for run in study.runs if run.best is not None]
    for key in [key for key in study.apart if key != "seed"]:
        values = [run.settings.get(key) for run in known]
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) == len(known) and len(set(numbers)) > 3:
            charts.append(_slice(study, key, known))
    return charts[:4]


def _slice(study: Study, key: str, runs: Sequence[Run]) -> Chart:
    at = [float(run.settings[key]) for run in runs]
    wide = min(at) > 0 and max(at) / min(at) > 20
    data = []
    for state, symbol in (("finished", "circle"), ("other", "x-thin-open")):
        mine = [run for run in runs if (run.record.state == "finished") == (state == "finished")]
        if mine:
            data.append(
                {"type": "scatter", "mode": "markers", "x": [float(run.settings[key]) for run in mine],
                 "y": [run.best for run in mine], "text": [plain(run.label) for run in mine],
                 "name": "finished" if state == "finished" else "not finished",
                 "marker": {"color": "@c0" if state == "finished" else "@c1", "symbol": symbol, "size": 9},
                 "hovertemplate": "%{text}: %{y}<extra></extra>"}
            )  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": plain(short(key))}}
        | ({"type": "log", "dtick": 1, "exponentformat": "power"} if wide else {}),
        "yaxis": {"title": {"text": plain(words.metric(study.metric))}},
        "showlegend": len(data) > 1,
    }
    title = f"{words.metric(study.metric)} by {short(key)}"
    ranked = [run for run in study.ranked if run in runs][:MAX_BARS]
    rows = [[run.label, words.setting(run.settings[key]), words.number(run.best)] for run in ranked]
    summary = f"{title}: a point for each of {words.plural(len(runs), 'run')}; the best is at {rows[0][1]}."
    header = ["run", short(key), words.metric(study.metric)]
    return Chart(f"slice-{key}", title, summary, data, layout, header, rows)
