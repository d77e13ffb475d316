"""Reads a sweep file with overrides of the command line, and reports settings that contradict each other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.config import loader, merge
from harness.config.constraints import Conflict
from harness.config.schema import flatten
from harness.errors import ConfigError
from harness.runs.files import is_url
from harness.tools.sweep.spec import Range, SweepSpec, identity

_SET_BY_THE_SWEEP = ("name", "output", "checkpoint.resume")
_OWN_KEYS = {field.alias or name for name, field in SweepSpec.model_fields.items()} - {"set", "space"}


@dataclass(frozen=True)
class SweepFile:
    """A sweep file as it was read."""

    spec: SweepSpec
    path: str
    """The file, as typed."""
    base: str
    """The experiment's YAML, relative to the working folder."""
    fixed: dict[str, Any]
    """Settings of every trial by dotted key: those of ``set``, overridden by those of the command line."""
    origins: dict[str, str]
    """Places of settings, for error messages: {dotted key: "file:line"}."""


def load(path: str, overrides: Sequence[str] = ()) -> SweepFile:
    """Read a sweep file.

    An override whose key belongs to the file (trials=30) changes the file; any other (train.epochs=3) is a setting of
    every trial. Raises ConfigError with all errors of the file.
    """
    own = [word for word in overrides if word.partition("=")[0] in _OWN_KEYS or "=" not in word]
    spec, origins = loader.load_as(SweepSpec, path, own, conflicts)
    settings = [word for word in overrides if word not in own]
    tree = OmegaConf.create({})
    for word in settings:
        tree, _ = merge.overridden(tree, word)
    typed = flatten(OmegaConf.to_container(tree))  # type: ignore[arg-type]
    if varied := [key for key in spec.axes if key in typed]:
        raise ConfigError(
            f"{varied[0]} is varied by the space of {path} and cannot be fixed too",
            where=loader.COMMAND_LINE,
            hint="remove it from the command line, or edit the space",
        )
    written = {key.partition(".")[2]: where for key, where in origins.items() if key.split(".")[0] in ("set", "space")}
    return SweepFile(
        spec=spec,
        path=path,
        base=os.path.normpath(Path(path).parent / spec.base),
        fixed={**flatten(spec.set_), **typed},
        origins=written | dict.fromkeys(typed, loader.COMMAND_LINE),
    )


def conflicts(spec: SweepSpec) -> Iterator[Conflict]:
    """All settings of a sweep file that contradict each other."""
    yield from _key_conflicts(spec)
    yield from _kind_conflicts(spec)
    yield from _axis_conflicts(spec)
    if is_url(spec.output):
        yield Conflict(("output",), "a sweep needs a local folder to follow its trials", "for example output=runs")
    if not spec.space:
        yield Conflict(("space",), "nothing varies", "for example space: {optimizer.lr: [0.01, 0.1]}")
    if isinstance(spec.space, list) and len({identity(trial) for trial in spec.space}) < len(spec.space):
        yield Conflict(("space",), "a trial is listed twice", "remove one; to repeat trials use seeds")


def _key_conflicts(spec: SweepSpec) -> Iterator[Conflict]:
    keys, fixed = spec.axes, flatten(spec.set_)
    for key in keys:
        if key in fixed:
            yield Conflict((f"space.{key}", f"set.{key}"), "varied by space and fixed by set", "remove one of them")
    for section, found in (("space", keys), ("set", list(fixed))):
        for key in found:
            if key in _SET_BY_THE_SWEEP:
                yield Conflict((f"{section}.{key}",), "the sweep sets it for each trial", "remove it")
    if "seed" in keys[:-1] and spec.seeds:
        yield Conflict(("seeds", "space.seed"), "the seed is varied twice", "remove one of them")


def _kind_conflicts(spec: SweepSpec) -> Iterator[Conflict]:
    if spec.is_search:
        if not isinstance(spec.space, dict):
            yield Conflict(
                ("space", "sampler"),
                "a search draws from ranges and choices, but this is a list of trials",
                "use sampler: grid, or space: {optimizer.lr: {low: 0.01, high: 1.0, log: true}}",
            )
        if spec.trials is None:
            yield Conflict(("sampler", "trials"), "a search needs a number of trials", "for example trials: 20")
        if spec.seeds:
            yield Conflict(
                ("seeds", "sampler"),
                "a search trains each draw once, with one seed",
                "replace seeds with set: {seed: 0}",
            )
    else:
        for key in ("trials", "sampler_args"):
            if getattr(spec, key):
                yield Conflict(
                    (key, "sampler"),
                    f"{key} is only for a search, but this is a grid",
                    "use a search, such as sampler: tpe",
                )
    if spec.pruner == "none" and spec.pruner_args:
        yield Conflict(
            ("pruner_args", "pruner"), "there is no pruner to use them", "use pruner: median, or remove them"
        )


def _axis_conflicts(spec: SweepSpec) -> Iterator[Conflict]:
    for key, axis in spec.space.items() if isinstance(spec.space, dict) else ():
        place = (f"space.{key}",)
        if isinstance(axis, list):
            if spec.is_search and not all(isinstance(value, None | bool | int | float | str) for value in axis):
                message = "a search chooses only among numbers, words, true, false and null"
                yield Conflict(place, message, "use sampler: grid")
            if len({identity(value) for value in axis}) < len(axis):
                yield Conflict(place, "a value is listed twice", "remove one; to repeat trials use seeds")
            continue
        if not spec.is_search:
            yield Conflict((*place, "sampler"), "a grid needs single values", "write [0.01, 0.1], or sampler: tpe")
        if isinstance(axis, Range):
            if axis.low >= axis.high:
                yield Conflict(
                    place, f"low {axis.low} is not below high {axis.high}", "use a smaller low, or a larger high"
                )
            if axis.log and axis.low <= 0:
                yield Conflict(place, f"log: true needs low > 0 (found: {axis.low})", "use log: false, or a larger low")
            if axis.log and axis.step:
                yield Conflict(place, "log and step cannot be combined", "remove one of them")
