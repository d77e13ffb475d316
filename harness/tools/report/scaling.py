"""Scaling with the number of ranks: time to a target, speed-up and efficiency of runs that differ only in world size.

Nothing is interpolated: the time to a target is the wall time of the first evaluation that reached it. The speed of a
run is in rows per second of training, without evaluations; over several seeds it is the mean.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from harness.tools.report.history import Direction
from harness.tools.report.run_set import ReportedRun, RunSet


@dataclass(frozen=True)
class TargetReached:
    """The first evaluation at which a run reached the target."""

    seconds: float
    samples: float
    epoch: float


@dataclass(frozen=True)
class Target:
    """A value of the deciding metric. ``why``: its origin."""

    value: float
    why: str


@dataclass(frozen=True)
class ScalingPoint:
    """All runs of a recipe at one world size, compared with the recipe's smallest world size. ``efficiency``: the share
    of the ideal speed-up. ``seconds``: to the target, None unless all runs reached it. None: one side is unknown."""

    world: int
    runs: list[ReportedRun]
    rows_per_s: float | None
    speed_up: float | None
    efficiency: float | None
    seconds: float | None
    times_sooner: float | None


@dataclass(frozen=True)
class ScalingSeries:
    """A recipe at several world sizes. ``same_batches``: the global batches are the same at each of them."""

    label: str
    points: list[ScalingPoint]
    same_batches: bool


def reached(run: ReportedRun, target: float, direction: Direction) -> TargetReached | None:
    """The evaluation at which ``run`` first reached ``target``; None if it never did."""
    improvements = run.history.improvements
    for place, value in enumerate(improvements.values.get("value", [])):
        if (value >= target) if direction == "max" else (value <= target):
            return TargetReached(*(float(improvements.at[axis][place]) for axis in ("seconds", "samples", "epoch")))
    return None


def series(runs: RunSet, target: float | None) -> list[ScalingSeries]:
    """The recipes that finished at two or more world sizes, in the order of their best runs."""
    found: dict[str, dict[int, list[ReportedRun]]] = {}
    for run in runs.ranked:
        if run.world and run.record.state == "finished":
            found.setdefault(run.recipe, {}).setdefault(run.world, []).append(run)
    made = []
    for by_world in found.values():
        if len(by_world) > 1:
            first = next(iter(by_world.values()))[0]
            label = runs.describe(first, without=("seed", "batch.per_rank"))
            same = first.settings.get("data.shard") == "global"
            made.append(ScalingSeries(label, _points(by_world, target, runs.direction), same))
    return made


def _points(by_world: dict[int, list[ReportedRun]], target: float | None, direction: Direction) -> list[ScalingPoint]:
    worlds = sorted(by_world)
    speeds = {world: _mean([run.history.rows_per_s for run in by_world[world]]) for world in worlds}
    times: dict[int, float | None] = dict.fromkeys(worlds)
    if target is not None:
        for world in worlds:
            when = [reached(run, target, direction) for run in by_world[world]]
            times[world] = _mean([found.seconds if found else None for found in when])
    base = worlds[0]
    points = []
    for world in worlds:
        speed_up, sooner = _ratio(speeds[world], speeds[base]), _ratio(times[base], times[world])
        efficiency = speed_up * base / world if speed_up is not None else None
        points.append(ScalingPoint(world, by_world[world], speeds[world], speed_up, efficiency, times[world], sooner))
    return points


def choose_target(runs: RunSet, asked: float | None) -> Target | None:
    """``asked``, or else a value that many of the runs that can be compared have reached.

    That is the value that half of the recipes reached at each of their world sizes, or else the value that half of the
    runs reached, rounded to three digits toward the easier side.
    """
    if asked is not None:
        return Target(asked, "chosen with --target")
    worst = min if runs.direction == "max" else max
    levels = [
        worst(values)
        for each in series(runs, None)
        if len(values := [run.best for point in each.points for run in point.runs if run.best is not None]) > 1
    ]
    values = levels or [run.best for run in runs.runs if run.best is not None]
    if not values:
        return None
    if levels:
        why = f"reached by {'half of the recipes' if len(values) > 1 else 'the recipe'} at every number of ranks"
    else:
        why = "reached by half of the runs" if len(values) > 1 else "reached by the run"
    ranked = sorted(values, reverse=runs.direction == "max")
    return Target(_easier(ranked[(len(ranked) - 1) // 2], runs.direction), why)


def _easier(value: float, direction: Direction) -> float:
    """``value`` at three significant digits, rounded so that a run that reached ``value`` has reached it too."""
    if value == 0 or not math.isfinite(value):
        return value
    digits = 2 - math.floor(math.log10(abs(value)))
    scaled = value * 10.0**digits
    whole = math.floor(scaled + 1e-9) if direction == "max" else math.ceil(scaled - 1e-9)
    rounded = round(whole / 10.0**digits, max(digits, 0))
    kept = rounded <= value if direction == "max" else rounded >= value
    return rounded if kept else value


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None
