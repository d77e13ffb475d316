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
import pyarrow as pa
import pyarrow.compute as pc

from harness.runs.reader import Record

Direction = Literal["max", "min"]
AXES = ("epoch", "samples", "seconds")
PHASES = ("data", "forward", "backward", "reduce", "optimizer", "host")  # of a step; log entries have time_PHASE
TRAIN_POINTS = 400  # per run, of the training curve
EVAL_POINTS = 200  # per run, of each validation curve
_MIN_ENTRIES = 5  # needed to judge how even the pace was
NOT_METRICS = frozenset(  # numbers of an evaluation's entry
    ["step", "epoch", "samples", "skipped", "wall_s", "lr", "loss_scale", "samples_per_s", "data_wait", "rows_used",
     "rows", "bad_rows", *(f"time_{phase}" for phase in PHASES)]
)  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """``values[name][i]`` was measured after ``steps[i]`` updates, at ``at[axis][i]``; arrays of shape (points,)."""

    steps: np.ndarray
    at: dict[str, np.ndarray]
    values: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.steps)

    def take(self, kept: np.ndarray) -> Curve:
        return Curve(
            self.steps[kept],
            {axis: values[kept] for axis, values in self.at.items()},
            {name: values[kept] for name, values in self.values.items()},
        )


def no_curve() -> Curve:
    return Curve(np.array([]), {axis: np.array([]) for axis in AXES}, {})


@dataclass(frozen=True)
class History:
    """``improvements``: evaluations better than all before, the last is the best; ``value`` is the deciding metric.
    ``shares``: of the training time, by phase, with sum 1. ``rows_per_s``: in training, without evaluations.
    ``burst``: the pace of the fastest tenth of the log, as a multiple of the mean; 1 if the pace was even.
    ``loss_scales``: smallest and largest."""

    train: Curve = field(default_factory=no_curve)
    validation: Curve = field(default_factory=no_curve)
    improvements: Curve = field(default_factory=no_curve)
    last: dict[str, float] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    rows_per_s: float | None = None
    burst: float | None = None
    train_s: float | None = None
    wall_s: float | None = None
    steps: int = 0
    samples: int | None = None
    skipped: int | None = None
    samples_skipped: int | None = None
    loss_scales: tuple[float, float] | None = None


def read(record: Record, metric: str | None, direction: Direction) -> History:
    """The history of ``record``, as far as it exists. ``metric`` decides which evaluation is better."""
    table = record.metrics()
    if not len(table):
        return History()
    train, epochs, evals = (table.filter(pc.equal(table["split"], split)) for split in ("train", "epoch", "eval"))
    axes = _Axes(train, epochs, evals)
    trained = axes.curve(train, ["loss", "lr", "loss_scale", "skipped"])
    evaluated = axes.curve(evals, _metrics(evals), finished_epochs=True)
    times_s = _window_s(train)
    scales = trained.values["loss_scale"][~np.isnan(trained.values["loss_scale"])]
    seconds = np.concatenate([trained.at["seconds"], evaluated.at["seconds"]])
    skipped = trained.values["skipped"]
    return History(
        train=trained.take(downsample([trained.values["loss"], trained.values["loss_scale"]], TRAIN_POINTS)),
        validation=evaluated.take(downsample(list(evaluated.values.values()), EVAL_POINTS)),
        improvements=_improvements(evaluated, metric, direction),
        last={name: float(values[-1]) for name, values in evaluated.values.items() if len(values)},
        shares=_shares(train, times_s),
        rows_per_s=_ratio(_rows(train)[times_s > 0].sum(), times_s.sum()),
        burst=_burst(_rows(train), times_s),
        train_s=float(times_s.sum()) or None,
        wall_s=_last(seconds, largest=True),
        steps=int(np.nanmax(np.concatenate([trained.steps, evaluated.steps, [0.0]]))),
        samples=None if (last := _last(trained.at["samples"])) is None else int(last),
        skipped=None if (last := _last(skipped)) is None else int(last),
        samples_skipped=None if (last := _last(_numbers(train, "samples_skipped"))) is None else int(last),
        loss_scales=(float(scales.min()), float(scales.max())) if len(scales) else None,
    )


class _Axes:
    """The position of an update in epochs, samples and seconds, interpolated where an entry does not have it."""

    def __init__(self, train: pa.Table, epochs: pa.Table, evals: pa.Table) -> None:
        self._steps, self._samples = _numbers(train, "step"), _numbers(train, "samples")
        ends = {0.0: 0.0}
        for table, offset in ((epochs, 1.0), (evals, 0.0)):  # the entry at the end of epoch e has epoch = e
            steps, numbers = _numbers(table, "step"), _numbers(table, "epoch") + offset
            pairs = zip(steps.tolist(), numbers.tolist(), strict=True)
            ends |= {step: epoch for step, epoch in pairs if epoch > 0 < step}
        self._ends = np.array(sorted(ends.items()))

    def curve(self, table: pa.Table, names: list[str], finished_epochs: bool = False) -> Curve:
        steps = _numbers(table, "step")
        epochs = _numbers(table, "epoch") if finished_epochs else self._epochs(table, steps)
        seconds = _numbers(table, "wall_s")
        samples = _between(steps, self._steps, self._samples)
        at = {"epoch": epochs, "samples": samples, "seconds": seconds}
        return Curve(steps, at, {name: _numbers(table, name) for name in names})

    def _epochs(self, table: pa.Table, steps: np.ndarray) -> np.ndarray:
        """Interpolated between the ends of epochs; after the last one, at the pace of the epoch before."""
        if len(self._ends) < 2:
            return _numbers(table, "epoch")
        (before, was), (last, done) = self._ends[-2:]
        pace = (done - was) / (last - before)
        behind = np.minimum(done + (steps - last) * pace, done + 1)
        return np.where(steps > last, behind, np.interp(steps, self._ends[:, 0], self._ends[:, 1]))


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    """A column as float64; NaN where there is no finite number."""
    if name not in table.column_names or not _is_number(table.schema.field(name).type):
        return np.full(len(table), np.nan)
    values: np.ndarray = table[name].cast(pa.float64()).to_numpy()
    return values if np.isfinite(values).all() else np.where(np.isfinite(values), values, np.nan)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind)


def _between(at: np.ndarray, steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    known = ~np.isnan(values)
    if not known.any():
        return np.full(len(at), np.nan)
    return np.interp(at, steps[known], values[known])


def _metrics(evals: pa.Table) -> list[str]:
    """The columns of evaluations that hold a metric, in the order of the log."""
    return [
        column.name
        for column in evals.schema
        if column.name not in NOT_METRICS and _is_number(column.type)
        if evals[column.name].null_count < len(evals)
    ]


def _improvements(evaluated: Curve, metric: str | None, direction: Direction) -> Curve:
    if metric not in evaluated.values:
        return no_curve()
    values = evaluated.values[metric]
    known = ~np.isnan(values)
    signed = np.where(known, values if direction == "max" else -values, -np.inf)
    before = np.concatenate([[-np.inf], np.maximum.accumulate(signed)[:-1]]) if len(signed) else signed
    found = evaluated.take(np.flatnonzero(signed > before))
    return Curve(found.steps, found.at, {"value": found.values[metric]})


def _rows(train: pa.Table) -> np.ndarray:
    """Training rows since the entry before."""
    return np.diff(np.nan_to_num(_numbers(train, "samples")), prepend=0.0)


def _window_s(train: pa.Table) -> np.ndarray:
    """Seconds of training since the entry before; 0 where an entry has no speed."""
    speed = np.nan_to_num(_numbers(train, "samples_per_s"))
    return np.divide(_rows(train), speed, out=np.zeros(len(speed)), where=speed > 0)


def _burst(rows: np.ndarray, times_s: np.ndarray) -> float | None:
    """Computed from whole windows only: the short one at the end of an epoch has a different speed."""
    if len(rows) < _MIN_ENTRIES:
        return None
    whole = (times_s > 0) & (rows >= np.median(rows))
    if whole.sum() < _MIN_ENTRIES:
        return None
    mean = rows[whole].sum() / times_s[whole].sum()
    return float(np.quantile(rows[whole] / times_s[whole], 0.9) / mean)


def _shares(train: pa.Table, times_s: np.ndarray) -> dict[str, float]:
    """Shares of the training time by phase: entries weighted by their duration."""
    phases = {phase: _numbers(train, f"time_{phase}") for phase in PHASES}
    known = (times_s > 0) & ~np.isnan(np.array(list(phases.values()))).all(axis=0)
    if not known.any():
        return {}
    weights = times_s[known] / times_s[known].sum()
    return {phase: float((np.nan_to_num(values[known]) * weights).sum()) for phase, values in phases.items()}


def _ratio(above: Any, below: Any) -> float | None:
    return float(above / below) if below > 0 else None


def _last(values: np.ndarray, largest: bool = False) -> float | None:
    known = values[~np.isnan(values)]
    return None if not len(known) else float(known.max() if largest else known[-1])


def downsample(series: Sequence[np.ndarray], limit: int) -> np.ndarray:
    """Ascending indices of the points to keep of ``series``, each of shape (points,): about ``limit`` at most.

    Keeps the first and the last point, and the smallest and the largest value of each series in every bucket of
    neighbors, so that a spike of a single point is never lost. NaN does not count as a value. Keeps all of ``limit``
    points or fewer.
    """
    num_points = len(series[0]) if series else 0
    if num_points <= limit:
        return np.arange(num_points)
    num_buckets = max(1, (limit - 2) // (2 * len(series)))
    width = -(-num_points // num_buckets)
    kept = {0, num_points - 1}
    starts = np.arange(0, num_points, width)
    for values in series:
        padded = np.full(len(starts) * width, np.nan)
        padded[:num_points] = values
        buckets = padded.reshape(len(starts), width)
        known = ~np.isnan(buckets).all(axis=1)
        smallest = np.where(np.isnan(buckets), np.inf, buckets).argmin(axis=1)
        largest = np.where(np.isnan(buckets), -np.inf, buckets).argmax(axis=1)
        kept.update((starts + smallest)[known].tolist(), (starts + largest)[known].tolist())
    return np.array(sorted(kept))
