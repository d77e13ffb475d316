"""Metrics, throughput and predictions of two runs or two groups of seeds, with the statistics of their difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.compute as pc

from harness.runs import layout
from harness.runs.reader import Record
from harness.tools.compare import significance
from harness.tools.report import history
from harness.tools.report.history import NOT_METRICS
from harness.tools.report.mistakes import read_predictions

Pair = tuple[float | None, float | None]


@dataclass(frozen=True)
class Evaluations:
    """Metrics of the newest evaluation of a run, and of the best one, whose weights it kept; empty if there is none."""

    step: int | None
    final: dict[str, float]
    best_step: int | None
    best: dict[str, float]
    best_metric: str | None


@dataclass(frozen=True)
class Metric:
    """A metric of two runs, in the newest evaluation and in the best one."""

    name: str
    final: Pair
    best: Pair


@dataclass(frozen=True)
class Throughput:
    """None where the log has no value. ``rows_per_s``: in training, over all ranks. ``shares``: of the training time,
    by the names in the log."""

    wall_s: float | None
    rows_per_s: float | None
    shares: dict[str, float]


@dataclass(frozen=True)
class PairedPredictions:
    """Predictions of both runs' best weights for the same rows: how many rows both predict correctly, only A, only B,
    neither. ``interval``: of B's accuracy minus A's. ``p``: of McNemar's exact test."""

    rows: int
    both: int
    only_one: int
    only_other: int
    neither: int
    difference: float
    interval: tuple[float, float]
    p: float


@dataclass(frozen=True)
class Spread:
    """A metric over the seeds of two groups. Standard errors and the interval are None for a single seed."""

    name: str
    values: tuple[list[float], list[float]]
    means: tuple[float, float]
    errors: tuple[float | None, float | None]
    interval: tuple[float, float] | None

    @property
    def difference(self) -> float:
        return self.means[1] - self.means[0]


def throughput(record: Record) -> Throughput:
    past = history.read(record, None, "max")
    return Throughput(past.wall_s, past.rows_per_s, {f"time_{phase}": share for phase, share in past.shares.items()})


def evaluations(record: Record) -> Evaluations:
    """Read the log, which exists while a run is still training; its summary names the best evaluation."""
    table = record.metrics()
    rows = table.filter(pc.equal(table["split"], "eval")).to_pylist()
    by_step = {row["step"]: _metrics(row) for row in rows if row["step"] is not None}
    best = record.summary.get("best")
    best = best if isinstance(best, dict) else {}
    last = max(by_step, default=None)
    metric = next((name for name in best if name != "step"), None)
    step = best.get("step") if metric and best[metric] is not None else None
    return Evaluations(last, by_step.get(last, {}), step, by_step.get(step, {}), metric)


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if name not in NOT_METRICS and isinstance(value, int | float) and not isinstance(value, bool)
    }


def metrics(one: Evaluations, other: Evaluations) -> list[Metric]:
    """Every metric of either run in the order of the logs, the metric that selects the best weights first."""
    names = dict.fromkeys([*one.final, *other.final])
    order = sorted(names, key=lambda name: name not in (one.best_metric, other.best_metric))
    return [
        Metric(name, (one.final.get(name), other.final.get(name)), (one.best.get(name), other.best.get(name)))
        for name in order
    ]


def paired_predictions(one: Path, other: Path) -> tuple[PairedPredictions | None, str]:
    """Pair predictions.csv of two run folders row by row; or the reason why this is impossible."""
    tables, read = [], []
    for label, folder in (("A", one), ("B", other)):
        table = read_predictions(folder / layout.PREDICTIONS)
        if table is None or "id" not in table.column_names:
            return None, f"{label} has no predictions.csv with ids, predictions and labels"
        read.append(table)
        tables.append(table.select(["id", "prediction", "label"]))
    mine, theirs = tables
    if any("error" in table.column_names for table in read):
        return None, "they are numbers, not classes; see the error metrics above"
    if mine.select(["id", "label"]) != theirs.select(["id", "label"]):
        if any(len(pc.unique(table["id"])) < len(table) for table in tables):
            return None, "their predictions.csv files contain different rows"
        mine = mine.join(theirs, ["id", "label"], right_suffix="_other", join_type="inner").combine_chunks()
    else:
        mine = mine.append_column("prediction_other", theirs["prediction"])
    mine = mine.drop_null()
    if not len(mine):
        return None, "their predictions.csv files have no row in common"
    right, other_right = pc.equal(mine["prediction"], mine["label"]), pc.equal(mine["prediction_other"], mine["label"])
    both, only_one, only_other = (
        pc.sum(pc.and_(*pair)).as_py()
        for pair in ((right, other_right), (right, pc.invert(other_right)), (pc.invert(right), other_right))
    )
    counts = both, only_one, only_other, len(mine) - both - only_one - only_other
    interval, p = significance.paired_interval(*counts), significance.mcnemar(only_one, only_other)
    return PairedPredictions(len(mine), *counts, (only_other - only_one) / len(mine), interval, p), ""


def spreads(one: Sequence[Evaluations], other: Sequence[Evaluations], best: bool) -> list[Spread]:
    """Metrics that all runs of both groups have, over their seeds, of the best evaluations or of the newest."""
    groups = [[run.best if best else run.final for run in group] for group in (one, other)]
    names = [name for name in groups[0][0] if all(name in run for group in groups for run in group)]
    deciding = one[0].best_metric
    found = []
    for name in sorted(names, key=lambda name: name != deciding):
        mine, theirs = ([run[name] for run in group] for group in groups)
        errors = significance.standard_error(mine), significance.standard_error(theirs)
        found.append(
            Spread(name, (mine, theirs), (fmean(mine), fmean(theirs)), errors, significance.welch(mine, theirs))
        )
    return found
