"""The sweep file: which experiment to train, which settings vary and how, and the trials of that space.

Whether the settings it names exist is checked later, by validating each trial's configuration (plan.py).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Discriminator, Field, Tag

from harness.config.base import Arguments, Name, Place, Positive, Section

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


class Choices(Section):
    """Values to choose from, for a search."""

    choices: Annotated[list[None | bool | int | float | str], Field(min_length=1)]
    """Numbers, words, true, false or null. A search assumes no order among them."""


def _kind_of_axis(value: Any) -> str:
    if isinstance(value, dict | Section):
        return "choices" if "choices" in value or isinstance(value, Choices) else "range"
    return "values"


Values = Annotated[list[Any], Field(min_length=1)]
Axis = Annotated[
    Annotated[Values, Tag("values")] | Annotated[Range, Tag("range")] | Annotated[Choices, Tag("choices")],
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
    space: dict[str, Axis] | list[dict[str, Any]]
    """The settings that vary: {setting: [values]} for a grid; {setting: {low, high}} or {setting: {choices}} for a
    search; or a list of trials, each {setting: value}. The number of ranks is a setting too: launch.nproc.
    """
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = []
    """Train every trial of a grid or list once with each of these seeds; empty: with the base's seed."""
    sampler: Literal["grid", "random", "qmc", "tpe", "gp", "cmaes"] = "grid"
    """grid: every combination, or every trial of the list. random, qmc, tpe, gp and cmaes: a search by Optuna."""
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
        trials = [self.space] if isinstance(self.space, dict) else self.space
        return [*dict.fromkeys(key for trial in trials for key in trial), *(["seed"] if self.seeds else [])]


def json_schema() -> str:
    """JSON Schema of a sweep file, for editors and ``configs/sweeps/schema.json``."""
    schema = SweepSpec.model_json_schema(by_alias=True)
    schema["title"] = "apex-harness sweep"
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


# The trials of a space, as plain data and as words of a command line


def grid(spec: SweepSpec) -> list[Settings]:
    """Every trial of a grid or a list. The first setting changes slowest, the seed fastest."""
    if isinstance(spec.space, list):
        trials = [dict(trial) for trial in spec.space]
    else:
        values = [values_of(axis) for axis in spec.space.values()]
        trials = [dict(zip(spec.space, chosen, strict=True)) for chosen in itertools.product(*values)]
    return [{**trial, "seed": seed} for trial in trials for seed in spec.seeds] if spec.seeds else trials


def corners(spec: SweepSpec) -> list[Settings]:
    """Extremes of a search's space: each end and each choice of one setting, the other settings at their first."""
    assert isinstance(spec.space, dict)
    ends = {
        key: [axis.low, axis.high] if isinstance(axis, Range) else values_of(axis) for key, axis in spec.space.items()
    }
    first = {key: values[0] for key, values in ends.items()}
    return [first, *({**first, key: value} for key, values in ends.items() for value in values[1:])]


def values_of(axis: Any) -> list[Any]:
    """The values of a list or of choices."""
    return axis.choices if isinstance(axis, Choices) else axis


def identity(settings: Any) -> str:
    """A text that is equal for equal settings in any order. 1 and 1.0 differ, as in YAML."""
    return json.dumps(settings, sort_keys=True, default=str)


def typed(settings: Settings) -> list[str]:
    """The settings as ``key=value`` words, which a command line reads as exactly these values."""
    return [f"{key}={spelled(value)}" for key, value in settings.items()]


def spelled(value: Any) -> str:
    """``value`` as it is typed after ``key=``, without quotes where none are needed."""
    quoted = json.dumps(value, ensure_ascii=False)
    for text in (value, quoted) if isinstance(value, str) else (quoted,):
        if _reads_as(text, value):
            return text
    return json.dumps(value)


def _reads_as(text: str, value: Any) -> bool:
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"a={text}"]))["a"]  # type: ignore[call-overload,index]
    except (OmegaConfBaseException, yaml.YAMLError, ValueError):
        return False
    return type(read) is type(value) and bool(read == value) and text == text.strip()
