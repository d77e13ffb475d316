"""Figures of the metric by settings: batch size × learning rate as a map, and each searched setting alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import plural
from harness.tools.report import formatting
from harness.tools.report.charts import MAX_BARS, Chart, Trace, plain
from harness.tools.report.run_set import ReportedRun, RunSet, describe

MAX_SLICES = 4
MAX_MAPS = 4
MAX_CELLS = 400
_ON_THE_MAP = frozenset(["batch.global", "batch.per_rank", "optimizer.lr", "seed"])


@dataclass(frozen=True)
class _Map:
    """Best values of runs that differ only by batch, learning rate and seed: {(global batch, rate): values}. ``title``:
    the settings in which other maps differ."""

    title: str
    cells: dict[tuple[int, float], list[float]]

    @property
    def batches(self) -> list[int]:
        return sorted({batch for batch, _ in self.cells})

    @property
    def rates(self) -> list[float]:
        return sorted({rate for _, rate in self.cells})

    @property
    def is_full(self) -> bool:
        """True if both were varied and at least half of their pairs were tried."""
        area = len(self.batches) * len(self.rates)
        return min(len(self.batches), len(self.rates)) > 1 and area <= min(MAX_CELLS, 2 * len(self.cells))


def heat_maps(runs: RunSet) -> list[Chart]:
    """Batch × learning rate, one map per world size and other settings; empty unless both were varied."""
    others = [key for key in runs.varied if key not in _ON_THE_MAP]
    several = len({run.world for run in runs.runs}) > 1
    maps: dict[tuple[str, ...], _Map] = {}
    for run in sorted(runs.runs, key=lambda run: run.world or 0):
        if run.world and run.best is not None and run.batch and run.lr:
            parts = [describe(run.settings, others)] + ([plural(run.world, "rank")] if several else [])
            key = (str(run.world), *(str(run.settings.get(other)) for other in others))
            found = maps.setdefault(key, _Map(" · ".join(filter(None, parts)), {}))
            found.cells.setdefault((run.batch, run.lr), []).append(run.best)
    full = [found for found in maps.values() if found.is_full][:MAX_MAPS]
    return [_heat_map(runs, found, number) for number, found in enumerate(full, 1)]


def _heat_map(runs: RunSet, found: _Map, number: int) -> Chart:
    means = {cell: statistics.fmean(values) for cell, values in found.cells.items()}
    best = (max if runs.direction == "max" else min)(means.values())
    grid = [[means.get((batch, rate)) for batch in found.batches] for rate in found.rates]
    text = [
        [("★ " if value == best else "") + formatting.number(value) if value is not None else "" for value in line]
        for line in grid
    ]
    heat: Trace = {
        "type": "heatmap", "z": grid, "x": [formatting.count(batch) for batch in found.batches],
        "y": [formatting.setting(rate) for rate in found.rates], "text": text, "texttemplate": "%{text}",
        "textfont": {"color": "@ink"},
        "colorscale": [[0, "@heat0"], [1, "@heat1"]], "reversescale": runs.direction == "min", "showscale": False,
        "xgap": 3, "ygap": 3, "hovertemplate": "batch %{x}, lr %{y}: %{z}<extra></extra>",
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "global batch"}, "type": "category", "showgrid": False},
        "yaxis": {"title": {"text": "learning rate"}, "type": "category", "showgrid": False},
    }
    rows = [
        [formatting.count(batch), formatting.setting(rate), formatting.number(mean), str(len(found.cells[batch, rate]))]
        for (batch, rate), mean in sorted(means.items())
    ]
    title = f"Best {formatting.metric(runs.metric)}" + (f", {found.title}" if found.title else "")
    batch, rate = next(cell for cell, mean in means.items() if mean == best)
    summary = f"{title}: {formatting.number(best)} at batch {batch}, learning rate {formatting.setting(rate)}."
    header = ["global batch", "learning rate", formatting.metric(runs.metric), "runs"]
    cell_height = max(24, min(52, 420 // len(found.rates)))
    height = 140 + cell_height * len(found.rates)
    return Chart(f"heat-{number}", title, summary, [heat], layout, header, rows, height=height)


def slices(runs: RunSet) -> list[Chart]:
    """The metric by each varied setting, one point per run; settings with fewer than four values are left out.

    For sweeps, only the settings that were searched, over the runs that searched them.
    """
    charts: list[Chart] = []
    swept = any(run.record.trial for run in runs.runs)
    for key in [key for key in runs.varied if key != "seed"]:
        known = [run for run in runs.ranked if run.best is not None]
        known = [run for run in known if not swept or (run.record.trial and key in run.record.trial.params)]
        values = [run.settings.get(key) for run in known]
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) == len(known) and len(set(numbers)) > 3 and len(charts) < MAX_SLICES:
            charts.append(_slice(runs, key, known))
    return charts


def _slice(runs: RunSet, key: str, known: Sequence[ReportedRun]) -> Chart:
    """``known``: the best run first."""
    at = [float(run.settings[key]) for run in known]
    wide = min(at) > 0 and max(at) / min(at) > 20
    data = []
    for state, symbol in (("finished", "circle"), ("other", "x-thin-open")):
        mine = [run for run in known if (run.record.state == "finished") == (state == "finished")]
        if mine:
            data.append(
                {"type": "scatter", "mode": "markers", "x": [float(run.settings[key]) for run in mine],
                 "y": [run.best for run in mine], "text": [plain(run.label) for run in mine],
                 "name": "finished" if state == "finished" else "not finished",
                 "marker": {"color": "@c0" if state == "finished" else "@c1", "symbol": symbol, "size": 9},
                 "hovertemplate": "%{text}: %{y}<extra></extra>"}
            )  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": plain(formatting.key(key))}}
        | ({"type": "log", "dtick": 1, "exponentformat": "power"} if wide else {}),
        "yaxis": {"title": {"text": plain(formatting.metric(runs.metric))}},
        "showlegend": len(data) > 1,
    }
    title = f"{formatting.metric(runs.metric)} by {formatting.key(key)}"
    rows = [[run.label, formatting.setting(run.settings[key]), formatting.number(run.best)] for run in known[:MAX_BARS]]
    summary = f"{title}: one point for each of {plural(len(known), 'run')}; the best is at {rows[0][1]}."
    header = ["run", formatting.key(key), formatting.metric(runs.metric)]
    return Chart(f"slice-{key}", title, summary, data, layout, header, rows)
