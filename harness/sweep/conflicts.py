"""What cannot stand together in a sweep file, each with what to type instead."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.constraints import Conflict
from harness.config.schema import flatten
from harness.runs.files import is_url
from harness.sweep.space import identity
from harness.sweep.spec import Range, Sweep, axes

_OF_TRIALS = ("name", "output", "checkpoint.resume")


def conflicts(sweep: Sweep) -> Iterator[Conflict]:
    """Every pair of settings of a sweep file that cannot stand together."""
    yield from _key_conflicts(sweep)
    yield from _kind_conflicts(sweep)
    yield from _range_conflicts(sweep)
    if is_url(sweep.output):
        yield Conflict(
            ("output",), "a sweep reads its trials' records as they are written", "name a folder: output=runs"
        )
    if not sweep.space:
        yield Conflict(("space",), "nothing is varied", "for example space: {optimizer.lr: [0.01, 0.1]}")
    if isinstance(sweep.space, list) and len({identity(trial) for trial in sweep.space}) < len(sweep.space):
        yield Conflict(("space",), "a trial stands here twice", "remove it; to repeat trials use seeds")


def _key_conflicts(sweep: Sweep) -> Iterator[Conflict]:
    keys, fixed = axes(sweep), flatten(sweep.set_)
    for key in keys:
        if key in fixed:
            yield Conflict(
                (f"space.{key}", f"set.{key}"), "varied by space, and one value in set", "remove one of them"
            )
    for section, found in (("space", keys), ("set", list(fixed))):
        for key in found:
            if key in _OF_TRIALS:
                yield Conflict((f"{section}.{key}",), "the sweep gives each trial its own", "remove it")
    if "seed" in keys[:-1] and sweep.seeds:
        yield Conflict(("seeds", "space.seed"), "the seed is varied twice", "remove one of them")


def _kind_conflicts(sweep: Sweep) -> Iterator[Conflict]:
    if sweep.is_search:
        if not isinstance(sweep.space, dict):
            yield Conflict(
                ("space", "sampler"),
                "a search draws from ranges and choices; this is a list of trials",
                "use sampler: grid, or space: {optimizer.lr: {low: 0.01, high: 1.0, log: true}}",
            )
        if sweep.trials is None:
            yield Conflict(
                ("sampler", "trials"), "a search ends after a number of trials, and none is set", "trials: 20"
            )
        if sweep.seeds:
            yield Conflict(("seeds", "sampler"), "a search trains each draw once", "set: {seed: 0}")
    else:
        for key in ("trials", "sampler_args"):
            if getattr(sweep, key):
                yield Conflict(
                    (key, "sampler"), f"{key} is for a search, and this is a grid", "sampler: tpe, or remove it"
                )
    if sweep.pruner == "none" and sweep.pruner_args:
        yield Conflict(("pruner_args", "pruner"), "there is no pruner to take them", "pruner: median, or remove them")


def _range_conflicts(sweep: Sweep) -> Iterator[Conflict]:
    for key, axis in sweep.space.items() if isinstance(sweep.space, dict) else ():
        if isinstance(axis, list):
            if sweep.is_search and not all(isinstance(value, None | bool | int | float | str) for value in axis):
                yield Conflict((f"space.{key}",), "a search chooses among numbers and words only", "use sampler: grid")
            if len({identity(value) for value in axis}) < len(axis):
                yield Conflict((f"space.{key}",), "a value stands here twice", "remove it; to repeat trials use seeds")
            continue
        if not sweep.is_search:
            yield Conflict((f"space.{key}", "sampler"), "a grid needs each value", "write [0.01, 0.1], or sampler: tpe")
        if isinstance(axis, Range):
            if axis.low >= axis.high:
                yield Conflict(
                    (f"space.{key}",), f"low {axis.low} is not below high {axis.high}", "swap or spread them"
                )
            if axis.log and axis.low <= 0:
                yield Conflict((f"space.{key}",), f"log of {axis.low}", "log: false, or a low above 0")
            if axis.log and axis.step:
                yield Conflict((f"space.{key}",), "log and step exclude each other", "remove one of them")
