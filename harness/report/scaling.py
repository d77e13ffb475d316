"""What more ranks bring: time to a target, speed-up and efficiency, over runs that differ in their world size alone.

Nothing is interpolated: the time to a target is the clock's at the first evaluation that reached it. The speed of a run
is rows trained a second of training, without evaluations; of several seeds it is the mean.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from harness.report.history import Direction
from harness.report.study import Run, Study


@dataclass(frozen=True)
class Reached:
    """When a run first had the target, by the clock and in training rows."""

    seconds: float
    samples: float
    epoch: float


@dataclass(frozen=True)
class Target:
    """A value of the deciding metric. ``why``: where it comes from."""

    value: float
    why: str


@dataclass(frozen=True)
class Point:
    """All runs of a recipe at one world size. ``speed_up`` is over the smallest world size of the recipe,
    ``efficiency`` its share of the ideal; None where a side is not known."""

    world: int
    runs: list[Run]
    rows_per_s: float | None
    speed_up: float | None
    efficiency: float | None
    seconds: float | None  # to the target; None unless all runs reached it
    sooner: float | None  # how many times sooner than the smallest world size


@dataclass(frozen=True)
class Ladder:
    """A recipe at several world sizes. ``same_batches``: the ranks together saw the same global batches at each."""

    label: str
    points: list[Point]
    same_batches: bool


def reached(run: Run, target: float, direction: Direction) -> Reached | None:
    """When ``run`` first had ``target``; None if it never did."""
    gains = run.history.gains
    for place, value in enumerate(gains.values.get("value", [])):
        if (value >= target) if direction == "max" else (value <= target):
            return Reached(*(float(gains.at[axis][place]) for axis in ("seconds", "samples", "epoch")))
    return None


def ladders(study: Study, target: float | None) -> list[Ladder]:
    """The recipes that were finished at two or more world sizes, in the order of their best runs."""
    found: dict[str, dict[int, list[Run]]] = {}
    for run in study.ranked:
        if run.world and run.record.state == "finished":
            found.setdefault(run.recipe, {}).setdefault(run.world, []).append(run)
    made = []
    for by_world in found.values():
        if len(by_world) > 1:
            first = next(iter(by_world.values()))[0]
            label = study.setting(first, without=("seed", "batch.per_rank"))
            same = first.settings.get("data.shard") == "global"
            made.append(Ladder(label, _points(by_world, target, study.direction), same))
    return made


def _points(by_world: dict[int, list[Run]], target: float | None, direction: Direction) -> list[Point]:
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
        points.append(Point(world, by_world[world], speeds[world], speed_up, efficiency, times[world], sooner))
    return points


def choose_target(study: Study, asked: float | None) -> Target | None:
    """The value that is asked for; else one that as much as can be compared has reached.

    That is the value that half of the recipes with several world sizes reached at each of them, or else the one that
    half of the runs have, rounded to three digits towards the easier.
    """
    if asked is not None:
        return Target(asked, "asked for with --target")
    worst = min if study.direction == "max" else max
    levels = [
        worst(values)
        for ladder in ladders(study, None)
        if len(values := [run.best for point in ladder.points for run in point.runs if run.best is not None]) > 1
    ]
    values = levels or [run.best for run in study.runs if run.best is not None]
    if not values:
        return None
    if len(values) == 1:
        why = "what was reached on every number of ranks" if levels else "what the run reached"
    else:
        why = "what half of the recipes reached on every number of ranks" if levels else "what half of the runs reached"
    ranked = sorted(values, reverse=study.direction == "max")
    return Target(_easier(ranked[(len(ranked) - 1) // 2], study.direction), why)


def _easier(value: float, direction: Direction) -> float:
    """``value`` at three significant digits, so that whoever has ``value`` has this too."""
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
