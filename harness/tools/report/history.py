"""The history of one run, thinned to what a figure needs.

Axes: ``epoch``: the position in the data, in epochs and fractions. ``samples``: training rows over all ranks.
``seconds``: wall time since training began, with evaluations and checkpoints, without the time between a stop and the
next start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa

from harness.runs.metrics_table import NOT_METRICS, PHASES
from harness.runs.reader import Record

Direction = Literal["max", "min"]
AXES = ("epoch", "samples", "seconds")
TRAIN_POINTS = 400  # per run, of the training curve
EVAL_POINTS = 200  # per run, of each validation curve


@dataclass(frozen=True)
class Curve:
    """``values[name][i]`` was measured after ``steps[i]`` updates, at ``at[axis][i]``; arrays of shape (points,)."""

    steps: np.ndarray
    at: dict[str, np.ndarray]
    values: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.steps)

    def take(self, mask: np.ndarray) -> Curve:
        return Curve(
            self.steps[mask],
            {axis: values[mask] for axis, values in self.at.items()},
            {name: values[mask] for name, values in self.values.items()},
        )


def no_curve() -> Curve:
    return Curve(np.array([]), {axis: np.array([]) for axis in AXES}, {})


@dataclass(frozen=True)
class History:
    """``improvements``: evaluations better than all before, the last is the best; ``value`` is the deciding metric.
    ``shares``: of the training time, by phase, with sum 1. ``rows_per_s``: in training, without evaluations."""

    train: Curve = field(default_factory=no_curve)
    validation: Curve = field(default_factory=no_curve)
    improvements: Curve = field(default_factory=no_curve)
    shares: dict[str, float] = field(default_factory=dict)
    rows_per_s: float | None = None
    wall_s: float | None = None
    skipped: int | None = None


def read(record: Record, metric: str | None, direction: Direction) -> History:
    """Return the history of ``record``, as far as it exists. ``metric`` decides which evaluation is better."""
    table = record.metrics()
    if not len(table):
        return History()
    log = _numbers(table)
    train, epochs, evals = (log[table["split"].to_pandas() == split] for split in ("train", "epoch", "eval"))
    ends = _ends_of_epochs(epochs, evals)
    trained = _curve(train, _epochs(train, ends), train, ["loss", "lr", "loss_scale", "skipped"])
    metrics = [name for name in evals if name not in NOT_METRICS and evals[name].notna().any()]
    evaluated = _curve(evals, _epochs(evals, ends), train, metrics)
    windows = _windows(train)
    return History(
        train=trained.take(downsample([trained.values["loss"], trained.values["loss_scale"]], TRAIN_POINTS)),
        validation=evaluated.take(downsample(list(evaluated.values.values()) or [evaluated.steps], EVAL_POINTS)),
        improvements=_improvements(evaluated, metric, direction),
        shares=_shares(train, windows["seconds"]),
        rows_per_s=_speed(windows[windows["seconds"] > 0]),
        wall_s=(record.summary.get("wall_s") if record.state == "finished" else None)
        or _known(pd.concat([train["wall_s"], evals["wall_s"]]).max()),
        skipped=_count(train["skipped"]),
    )


def _numbers(table: pa.Table) -> pd.DataFrame:
    """Return the columns of numbers as float64, with NaN where there is no finite number."""
    kinds = {field.name: field.type for field in table.schema}
    names = [name for name, kind in kinds.items() if pa.types.is_floating(kind) or pa.types.is_integer(kind)]
    log = table.select(names).to_pandas().astype(float)
    return log.where(np.isfinite(log))


def _ends_of_epochs(epochs: pd.DataFrame, evals: pd.DataFrame) -> pd.Series:
    """Return {step: number of finished epochs}, ascending, from 0. A run may end, and evaluate, within an epoch: that
    number of epochs was finished at an earlier step."""
    ends = pd.concat([entries.set_index("step")["epoch"] for entries in (epochs, evals)])
    ends = ends[(ends > 0) & (ends.index > 0)].groupby(level=0).last()
    return pd.concat([pd.Series({0.0: 0.0}), ends[ends > ends.cummax().shift(fill_value=0.0)]])


def _epochs(entries: pd.DataFrame, ends: pd.Series) -> np.ndarray:
    """Interpolated between the ends of epochs; after the last one, at the pace of the epoch before; 0 before any."""
    if len(ends) < 2:
        return np.zeros(len(entries))
    steps = entries["step"].to_numpy()
    (before, last), (was, done) = ends.index[-2:], ends.iloc[-2:]
    behind = np.minimum(done + (steps - last) * (done - was) / (last - before), done + 1)
    return np.where(steps > last, behind, np.interp(steps, ends.index, ends))


def _curve(entries: pd.DataFrame, epochs: Any, train: pd.DataFrame, names: list[str]) -> Curve:
    """Return the columns ``names`` of ``entries``. Samples are interpolated, because only entries of training have
    them."""
    steps, counted = entries["step"].to_numpy(), train.dropna(subset="samples")
    samples = np.interp(steps, counted["step"], counted["samples"]) if len(counted) else np.full(len(steps), np.nan)
    axis_values = {"epoch": np.asarray(epochs), "samples": samples, "seconds": entries["wall_s"].to_numpy()}
    return Curve(steps, axis_values, {name: entries[name].to_numpy() for name in names})


def _improvements(evaluated: Curve, metric: str | None, direction: Direction) -> Curve:
    if metric not in evaluated.values:
        return no_curve()
    values = pd.Series(evaluated.values[metric])
    signed = (values if direction == "max" else -values).fillna(-np.inf)
    best_so_far = evaluated.take(np.flatnonzero(signed > signed.cummax().shift(fill_value=-np.inf)))
    return Curve(best_so_far.steps, best_so_far.at, {"value": best_so_far.values[metric]})


def _windows(train: pd.DataFrame) -> pd.DataFrame:
    """Rows, and seconds of training, since the entry before; 0 s where an entry has no speed."""
    rows = train["samples"].fillna(0.0).diff().fillna(train["samples"].fillna(0.0))
    speed = train["samples_per_s"]
    return pd.DataFrame({"rows": rows, "seconds": (rows / speed.where(speed > 0)).fillna(0.0)})


def _speed(windows: pd.DataFrame) -> float | None:
    """Rows per second."""
    rows, seconds = windows["rows"].sum(), windows["seconds"].sum()
    return float(rows / seconds) if seconds > 0 else None


def _shares(train: pd.DataFrame, seconds: pd.Series) -> dict[str, float]:
    """Shares of the training time by phase: entries weighted by their duration."""
    phases = train[[f"time_{phase}" for phase in PHASES]]
    has_phases = (seconds > 0) & phases.notna().any(axis=1)
    if not has_phases.any():
        return {}
    weighted = phases[has_phases].fillna(0.0).mul(seconds[has_phases] / seconds[has_phases].sum(), axis=0).sum()
    return {phase: float(weighted[f"time_{phase}"]) for phase in PHASES}


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _count(values: pd.Series) -> int | None:
    """Return the last number."""
    counted = values.dropna()
    return int(counted.iloc[-1]) if len(counted) else None


def downsample(series: Sequence[np.ndarray], limit: int) -> np.ndarray:
    """Ascending indices of the points to keep of ``series``, each of shape (points,): about ``limit`` at most.

    Keeps the first and the last point, and the smallest and the largest value of each series in every bucket of
    neighbors, so that a spike of a single point is never lost. NaN does not count as a value. Keeps all of ``limit``
    points or fewer.
    """
    points = pd.DataFrame(dict(enumerate(series)))
    if len(points) <= limit:
        return np.arange(len(points))
    width = -(-len(points) // max(1, (limit - 2) // (2 * len(series))))
    buckets = points.index // width
    smallest = points.fillna(np.inf).groupby(buckets).idxmin()
    largest = points.fillna(-np.inf).groupby(buckets).idxmax()
    return np.unique([0, len(points) - 1, *smallest.to_numpy().ravel(), *largest.to_numpy().ravel()])
