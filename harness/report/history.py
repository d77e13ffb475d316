"""The history of one run, as small as a figure needs it: its record read once, reduced, and let go of.

``epoch`` is where in the data an update was, in epochs and fractions; ``samples`` are training rows over all ranks;
``seconds`` are those of the clock since training began, with evaluations and checkpoints, without the time between a
stop and the next start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.report import downsample
from harness.runs.reader import Record

Direction = Literal["max", "min"]
AXES = ("epoch", "samples", "seconds")
PHASES = ("data", "forward", "backward", "reduce", "optimizer", "host")  # of a step; shares are in time_PHASE
TRAIN_POINTS = 400  # of a run's training curve
EVAL_POINTS = 200  # of each held-out curve
_MIN_WINDOWS = 5  # lines of a record that tell whether its pace was even
NOT_METRICS = frozenset(  # of the numbers in an evaluation's line
    ["step", "epoch", "samples", "skipped", "wall_s", "lr", "loss_scale", "samples_per_s", "data_wait", "rows_used",
     "rows", "bad_rows", *(f"time_{phase}" for phase in PHASES)]
)  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """``values[name][i]`` was measured after ``steps[i]`` updates, where ``at[axis][i]`` says; (points,) each."""

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
    """``gains``: the evaluations that were better than all before them, with the deciding metric as ``value``; the last
    one is the best. ``shares``: of the time, by phase, adding up to 1; of an old run ``data`` and ``rest`` alone.
    ``rows_per_s``: rows trained a second of training, evaluations left out. ``swing``: how many times that the
    fastest tenth of the record's lines is; 1 where the pace was even."""

    train: Curve = field(default_factory=no_curve)
    held_out: Curve = field(default_factory=no_curve)
    gains: Curve = field(default_factory=no_curve)
    last: dict[str, float] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    rows_per_s: float | None = None
    swing: float | None = None
    train_s: float | None = None
    wall_s: float | None = None
    steps: int = 0
    samples: int | None = None
    skipped: int | None = None
    loss_scales: tuple[float, float] | None = None  # least, largest


def read(record: Record, metric: str | None, direction: Direction) -> History:
    """The history of ``record``, whatever of it is there. ``metric`` decides which evaluation is better."""
    table = record.metrics()
    if not len(table):
        return History()
    train, edges, held_out = (table.filter(pc.equal(table["split"], split)) for split in ("train", "epoch", "eval"))
    places = _Places(train, edges, held_out)
    trained = places.curve(train, ["loss", "lr", "loss_scale", "skipped"])
    evaluated = places.curve(held_out, _metrics(held_out), finished_epochs=True)
    times_s = _window_s(train)
    scales = trained.values["loss_scale"][~np.isnan(trained.values["loss_scale"])]
    seconds = np.concatenate([trained.at["seconds"], evaluated.at["seconds"]])
    skipped = trained.values["skipped"]
    return History(
        train=trained.take(downsample.keep([trained.values["loss"], trained.values["loss_scale"]], TRAIN_POINTS)),
        held_out=evaluated.take(downsample.keep(list(evaluated.values.values()), EVAL_POINTS)),
        gains=_gains(evaluated, metric, direction),
        last={name: float(values[-1]) for name, values in evaluated.values.items() if len(values)},
        shares=_shares(train, times_s),
        rows_per_s=_ratio(_rows(train)[times_s > 0].sum(), times_s.sum()),
        swing=_swing(_rows(train), times_s),
        train_s=float(times_s.sum()) or None,
        wall_s=_last(seconds, largest=True),
        steps=int(np.nanmax(np.concatenate([trained.steps, evaluated.steps, [0.0]]))),
        samples=None if (last := _last(trained.at["samples"])) is None else int(last),
        skipped=None if (last := _last(skipped)) is None else int(last),
        loss_scales=(float(scales.min()), float(scales.max())) if len(scales) else None,
    )


class _Places:
    """Where an update was: in epochs, samples and seconds. Lines that do not say are between those that do."""

    def __init__(self, train: pa.Table, edges: pa.Table, held_out: pa.Table) -> None:
        self._steps, self._samples = _numbers(train, "step"), _numbers(train, "samples")
        self._seconds = _numbers(train, "wall_s")
        ends = {0.0: 0.0}
        for table, behind in ((edges, 1.0), (held_out, 0.0)):  # an epoch's own line still has that epoch's number
            steps, epochs = _numbers(table, "step"), _numbers(table, "epoch") + behind
            ends |= {
                step: epoch for step, epoch in zip(steps.tolist(), epochs.tolist(), strict=True) if epoch > 0 < step
            }
        self._ends = np.array(sorted(ends.items()))

    def curve(self, table: pa.Table, names: list[str], finished_epochs: bool = False) -> Curve:
        steps = _numbers(table, "step")
        epochs = _numbers(table, "epoch") if finished_epochs else self._epochs(table, steps)
        seconds = _numbers(table, "wall_s")
        samples = _between(steps, self._steps, self._samples)
        at = {"epoch": epochs, "samples": samples, "seconds": seconds}
        return Curve(steps, at, {name: _numbers(table, name) for name in names})

    def _epochs(self, table: pa.Table, steps: np.ndarray) -> np.ndarray:
        """Between the ends of epochs; behind the last one, at the pace of the epoch before."""
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


def _metrics(held_out: pa.Table) -> list[str]:
    """The columns of evaluations that hold a metric, in the record's order."""
    return [
        column.name
        for column in held_out.schema
        if column.name not in NOT_METRICS
        and _is_number(column.type)
        and held_out[column.name].null_count < len(held_out)
    ]


def _gains(evaluated: Curve, metric: str | None, direction: Direction) -> Curve:
    if metric not in evaluated.values:
        return no_curve()
    values = evaluated.values[metric]
    known = ~np.isnan(values)
    signed = np.where(known, values if direction == "max" else -values, -np.inf)
    before = np.concatenate([[-np.inf], np.maximum.accumulate(signed)[:-1]]) if len(signed) else signed
    found = evaluated.take(np.flatnonzero(signed > before))
    return Curve(found.steps, found.at, {"value": found.values[metric]})


def _rows(train: pa.Table) -> np.ndarray:
    """Training rows since the line before."""
    return np.diff(np.nan_to_num(_numbers(train, "samples")), prepend=0.0)


def _window_s(train: pa.Table) -> np.ndarray:
    """Seconds of training since the line before; 0 where a line does not tell its speed."""
    speed = np.nan_to_num(_numbers(train, "samples_per_s"))
    return np.divide(_rows(train), speed, out=np.zeros(len(speed)), where=speed > 0)


def _swing(rows: np.ndarray, times_s: np.ndarray) -> float | None:
    """Of whole windows alone: the short one at the end of an epoch has a speed of its own."""
    if len(rows) < _MIN_WINDOWS:
        return None
    whole = (times_s > 0) & (rows >= np.median(rows))
    if whole.sum() < _MIN_WINDOWS:
        return None
    mean = rows[whole].sum() / times_s[whole].sum()
    return float(np.quantile(rows[whole] / times_s[whole], 0.9) / mean)


def _shares(train: pa.Table, times_s: np.ndarray) -> dict[str, float]:
    """Where the time of training went: each line counts as long as it lasted."""
    told = {phase: _numbers(train, f"time_{phase}") for phase in PHASES}
    known = (times_s > 0) & ~np.isnan(np.array(list(told.values()))).all(axis=0)
    if known.any():
        weights = times_s[known] / times_s[known].sum()
        return {phase: float((np.nan_to_num(values[known]) * weights).sum()) for phase, values in told.items()}
    wait = _numbers(train, "data_wait")
    known = (times_s > 0) & ~np.isnan(wait)
    if not known.any():
        return {}
    data = float((wait[known] * times_s[known]).sum() / times_s[known].sum())
    return {"data": data, "rest": 1.0 - data}


def _ratio(above: Any, below: Any) -> float | None:
    return float(above / below) if below > 0 else None


def _last(values: np.ndarray, largest: bool = False) -> float | None:
    known = values[~np.isnan(values)]
    return None if not len(known) else float(known.max() if largest else known[-1])
