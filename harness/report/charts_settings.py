"""Figures of what settings did to the metric: batch × learning rate as a map, and each searched setting by itself."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.report import words
from harness.report.charts import MAX_BARS, Chart, plain
from harness.report.study import Run, Study, describe, short

MAX_SLICES = 4
MAX_MAPS = 4
MAX_CELLS = 400
_ON_THE_MAP = frozenset(["batch.global", "batch.per_rank", "optimizer.lr", "seed"])


@dataclass(frozen=True)
class _Map:
    """Best values of runs alike but for batch, learning rate and seed: {(global batch, rate): values}. ``where`` says
    what they are alike in, where other maps differ."""

    where: str
    cells: dict[tuple[int, float], list[float]]

    @property
    def batches(self) -> list[int]:
        return sorted({batch for batch, _ in self.cells})

    @property
    def rates(self) -> list[float]:
        return sorted({rate for _, rate in self.cells})

    @property
    def is_full(self) -> bool:
        """Whether both were varied, and most pairs of them tried."""
        area = len(self.batches) * len(self.rates)
        return min(len(self.batches), len(self.rates)) > 1 and area <= min(MAX_CELLS, 2 * len(self.cells))


def heat_maps(study: Study) -> list[Chart]:
    """Batch × learning rate, a map for each world size and other setting; nothing unless both were varied."""
    others = [key for key in study.apart if key not in _ON_THE_MAP]
    several = len({run.world for run in study.runs}) > 1
    maps: dict[tuple[str, ...], _Map] = {}
    for run in sorted(study.runs, key=lambda run: run.world or 0):
        if run.world and run.best is not None and run.batch and run.lr:
            words_ = [describe(run.settings, others)] + ([words.plural(run.world, "rank")] if several else [])
            key = (str(run.world), *(str(run.settings.get(other)) for other in others))
            found = maps.setdefault(key, _Map(" · ".join(filter(None, words_)), {}))
            found.cells.setdefault((run.batch, run.lr), []).append(run.best)
    full = [found for found in maps.values() if found.is_full][:MAX_MAPS]
    return [_heat_map(study, found, number) for number, found in enumerate(full, 1)]


def _heat_map(study: Study, found: _Map, number: int) -> Chart:
    means = {cell: statistics.fmean(values) for cell, values in found.cells.items()}
    best = (max if study.direction == "max" else min)(means.values())
    grid = [[means.get((batch, rate)) for batch in found.batches] for rate in found.rates]
    text = [
        [("★ " if value == best else "") + words.number(value) if value is not None else "" for value in line]
        for line in grid
    ]
    heat = {
        "type": "heatmap", "z": grid, "x": [words.count(batch) for batch in found.batches],
        "y": [words.setting(rate) for rate in found.rates], "text": text, "texttemplate": "%{text}",
        "textfont": {"color": "@ink"},
        "colorscale": [[0, "@heat0"], [1, "@heat1"]], "reversescale": study.direction == "min", "showscale": False,
        "xgap": 3, "ygap": 3, "hovertemplate": "batch %{x}, lr %{y}: %{z}<extra></extra>",
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "global batch"}, "type": "category", "showgrid": False},
        "yaxis": {"title": {"text": "learning rate"}, "type": "category", "showgrid": False},
    }
    rows = [
        [words.count(batch), words.setting(rate), words.number(mean), str(len(found.cells[batch, rate]))]
        for (batch, rate), mean in sorted(means.items())
    ]
    title = f"Best {words.metric(study.metric)}" + (f", {found.where}" if found.where else "")
    batch, rate = next(cell for cell, mean in means.items() if mean == best)
    summary = f"{title}: {words.number(best)} at batch {batch}, learning rate {words.setting(rate)}."
    header = ["global batch", "learning rate", words.metric(study.metric), "runs"]
    cell_height = max(24, min(52, 420 // len(found.rates)))
    height = 140 + cell_height * len(found.rates)
    return Chart(f"heat-{number}", title, summary, [heat], layout, header, rows, height=height)


def slices(study: Study) -> list[Chart]:
    """What each setting did to the metric, a point a run; nothing where there are few values.

    Of sweeps, the settings that were searched, over the runs that searched them.
    """
    charts: list[Chart] = []
    swept = any(run.record.trial for run in study.runs)
    for key in [key for key in study.apart if key != "seed"]:
        known = [run for run in study.ranked if run.best is not None]
        known = [run for run in known if not swept or (run.record.trial and key in run.record.trial.params)]
        values = [run.settings.get(key) for run in known]
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) == len(known) and len(set(numbers)) > 3 and len(charts) < MAX_SLICES:
            charts.append(_slice(study, key, known))
    return charts


def _slice(study: Study, key: str, runs: Sequence[Run]) -> Chart:
    """``runs``: the best first."""
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
    rows = [[run.label, words.setting(run.settings[key]), words.number(run.best)] for run in runs[:MAX_BARS]]
    summary = f"{title}: a point for each of {words.plural(len(runs), 'run')}; the best is at {rows[0][1]}."
    header = ["run", short(key), words.metric(study.metric)]
    return Chart(f"slice-{key}", title, summary, data, layout, header, rows)
