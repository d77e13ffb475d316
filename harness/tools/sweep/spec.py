"""The sweep file: which experiment to train, which settings vary and how, and the trials of that space.

Settings that contradict each other are reported here. Whether the settings that it names exist is checked later, by
validating each trial's configuration (plan.py).
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from pydantic import Discriminator, Field, Tag

from harness.config import loader, merge
from harness.config.base import Arguments, Name, Place, Positive, Section
from harness.config.constraints import Conflict
from harness.config.places import is_url
from harness.config.trees import flatten
from harness.errors import ConfigError

Settings = dict[str, Any]  # {dotted key: value} of the settings that differ between trials
Number = Annotated[int | float, Field(allow_inf_nan=False)]


class Range(Section):
    """Numbers between two ends, for a search."""

    low: Number
    """Smallest value. If both ends are integers, only integers are drawn."""
    high: Number
    """Largest value."""
    log: bool = False
    """Draw uniformly on a logarithmic scale: for rates and sizes that span orders of magnitude."""
    step: Annotated[int | float, Field(gt=0)] | None = None
    """Draw only low, low + step, ...; null: any value."""


def _kind_of_axis(value: Any) -> str:
    return "range" if isinstance(value, dict | Section) else "values"


Values = Annotated[list[Any], Field(min_length=1)]
Axis = Annotated[
    Annotated[Values, Tag("values")] | Annotated[Range, Tag("range")],
    Discriminator(_kind_of_axis),
]


class SweepSpec(Section):
    """One sweep."""

    name: Name
    """The sweep folder is OUTPUT/NAME."""
    output: Place = "runs"
    """Parent of the sweep folder, relative to the working folder."""
    base: Place
    """YAML of the experiment that trials are based on, relative to this file."""
    set_: Annotated[dict[str, Any], Field(alias="set")] = {}
    """Settings of every trial on top of the base, such as {train.epochs: 3}."""
    space: dict[str, Axis]
    """The settings that vary: {setting: [values]}, in which a search assumes no order; for a search also
    {setting: {low, high}}. The number of ranks is a setting too: launch.nproc.
    """
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = []
    """Train every trial of a grid once with each of these seeds; empty: with the base's seed."""
    sampler: Literal["grid", "random", "tpe"] = "grid"
    """grid: every combination. random and tpe: a search by Optuna."""
    sampler_args: Arguments = {}
    """Keyword arguments of Optuna's sampler, such as {n_startup_trials: 5}; null: none."""
    trials: Positive | None = None
    """Number of trials in a search."""
    pruner: Literal["none", "median", "percentile", "successive_halving", "hyperband"] = "none"
    """Optuna's rule for stopping trials early when their evaluations are worse than others' at the same epoch."""
    pruner_args: Arguments = {}
    """Keyword arguments of Optuna's pruner, such as {n_warmup_steps: 2} (epochs); null: none."""
    metric: str | None = None
    """Evaluation metric that ranks the trials, by its best value; null: the base's checkpoint.best_metric."""
    parallel: Positive = 1
    """Maximum number of trials at once; also limited by cores (launch.nproc x launch.threads per trial) and GPUs."""
    comparable: bool = True
    """Refuse trials whose results cannot be compared; false: only warn."""

    @property
    def is_search(self) -> bool:
        return self.sampler != "grid"

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name

    @property
    def axes(self) -> list[str]:
        """The settings that vary, in the order of the file."""
        return [*self.space, *(["seed"] if self.seeds else [])]


def json_schema() -> str:
    """Return the JSON Schema of a sweep file, for editors and ``configs/sweeps/schema.json``."""
    schema = SweepSpec.model_json_schema(by_alias=True)
    schema["title"] = "apex-harness sweep"
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


# The trials of a space, as plain data


def grid(spec: SweepSpec) -> list[Settings]:
    """Return every trial of a grid. The first setting changes slowest, the seed fastest."""
    values: list[Any] = list(spec.space.values())
    trials = [dict(zip(spec.space, chosen, strict=True)) for chosen in itertools.product(*values)]
    return [{**trial, "seed": seed} for trial in trials for seed in spec.seeds] if spec.seeds else trials


def corners(spec: SweepSpec) -> list[Settings]:
    """Return the extremes of a search: each end and each choice of one setting, the other settings at their first."""
    ends = {key: [axis.low, axis.high] if isinstance(axis, Range) else axis for key, axis in spec.space.items()}
    first = {key: values[0] for key, values in ends.items()}
    return [first, *({**first, key: value} for key, values in ends.items() for value in values[1:])]


def identity(settings: Any) -> str:
    """Return a text that is equal for equal settings in any order. 1 and 1.0 differ, as in YAML."""
    return json.dumps(settings, sort_keys=True, default=str)


# Reading a file

_SET_BY_THE_SWEEP = {
    "name": "the sweep sets it for each trial",
    "output": "the sweep sets it for each trial",
    "checkpoint.resume": "an interrupted trial always resumes from its own checkpoint",
}
_OWN_KEYS = {field.alias or name for name, field in SweepSpec.model_fields.items()} - {"set", "space"}


def _is_own(key: str) -> bool:
    """Return True if ``key`` is one of the sweep file's: parallel is, parallel.logical_ranks is a setting."""
    name, _, rest = key.partition(".")
    return name in _OWN_KEYS and (not rest or name in ("sampler_args", "pruner_args"))


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
    own = [word for word in overrides if _is_own(word.partition("=")[0]) or "=" not in word]
    spec, origins = loader.load_as(SweepSpec, path, own, conflicts)
    settings = [word for word in overrides if word not in own]
    tree = OmegaConf.create({})
    for word in settings:
        tree, _ = merge.overridden(tree, word)
    overridden = flatten(OmegaConf.to_container(tree))  # type: ignore[arg-type]
    if varied := [key for key in spec.axes if key in overridden]:
        raise ConfigError(
            f"{varied[0]} is varied by the space of {path} and cannot be fixed too",
            where=merge.COMMAND_LINE,
            hint="remove it from the command line, or edit the space",
        )
    written = {key.partition(".")[2]: where for key, where in origins.items() if key.split(".")[0] in ("set", "space")}
    return SweepFile(
        spec=spec,
        path=path,
        base=os.path.normpath(Path(path).parent / spec.base),
        fixed={**flatten(spec.set_), **overridden},
        origins=written | dict.fromkeys(overridden, merge.COMMAND_LINE),
    )


def conflicts(spec: SweepSpec) -> Iterator[Conflict]:
    """Yield the settings of a sweep file that contradict each other."""
    yield from _key_conflicts(spec)
    yield from _kind_conflicts(spec)
    yield from _axis_conflicts(spec)
    if is_url(spec.output):
        yield Conflict("output", "a sweep needs a local folder to follow its trials", "for example output=runs")
    if not spec.space:
        yield Conflict("space", "nothing varies", "for example space: {optimizer.lr: [0.01, 0.1]}")


def _key_conflicts(spec: SweepSpec) -> Iterator[Conflict]:
    keys, fixed = spec.axes, flatten(spec.set_)
    for key in keys:
        if key in fixed:
            yield Conflict(f"space.{key}", "varied by space and fixed by set", "remove one of them")
    for section, found in (("space", keys), ("set", list(fixed))):
        for key in found:
            if key in _SET_BY_THE_SWEEP:
                yield Conflict(f"{section}.{key}", _SET_BY_THE_SWEEP[key], "remove it")
    if "seed" in spec.space and spec.is_search:
        yield Conflict("space.seed", "a search over seeds finds chance", "remove the seed from the space")
    if "seed" in spec.space and spec.seeds:
        yield Conflict("seeds", "the seed is varied twice", "remove one of them")
    if len(set(spec.seeds)) < len(spec.seeds):
        yield Conflict("seeds", "a seed is listed twice", "remove one: its trials would be equal")


def _kind_conflicts(spec: SweepSpec) -> Iterator[Conflict]:
    if spec.is_search:
        if spec.trials is None:
            yield Conflict("sampler", "a search needs a number of trials", "for example trials: 20")
        if spec.seeds:
            message = "a search trains each draw once, with one seed"
            yield Conflict("seeds", message, "replace seeds with set: {seed: 0}")
    else:
        for key in ("trials", "sampler_args"):
            if getattr(spec, key):
                message = f"{key} is only for a search, but this is a grid"
                yield Conflict(key, message, "use a search, such as sampler: tpe")
    if spec.pruner == "none" and spec.pruner_args:
        yield Conflict("pruner_args", "there is no pruner to use them", "use pruner: median, or remove them")


def _axis_conflicts(spec: SweepSpec) -> Iterator[Conflict]:
    for key, axis in spec.space.items():
        place = f"space.{key}"
        if isinstance(axis, list):
            if spec.is_search and not all(isinstance(value, None | bool | int | float | str) for value in axis):
                message = "a search chooses only among numbers, words, true, false and null"
                yield Conflict(place, message, "use sampler: grid")
            if len({identity(value) for value in axis}) < len(axis):
                yield Conflict(place, "a value is listed twice", "remove one; to repeat trials use seeds")
            continue
        if not spec.is_search:
            yield Conflict(place, "a grid needs single values", "write [0.01, 0.1], or sampler: tpe")
        if axis.low >= axis.high:
            message = f"low {axis.low} is not below high {axis.high}"
            yield Conflict(place, message, "use a smaller low, or a larger high")
        if axis.log and axis.low <= 0:
            yield Conflict(place, f"log: true needs low > 0 (found: {axis.low})", "use log: false, or a larger low")
        if axis.log and axis.step:
            yield Conflict(place, "log and step cannot be combined", "remove one of them")
