"""The sweep file: which experiment, which settings are varied and how, as models.

Reading one lives in ``harness.sweep.file``, what cannot stand together in ``harness.sweep.conflicts``, what trials come
of it in ``harness.sweep.space``. Whether the settings it names exist is for the experiment's own configuration to say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from harness.config.base import Arguments, Positive, Section

Number = Annotated[int | float, Field(allow_inf_nan=False)]


class Range(Section):
    """Numbers between two ends, for a search."""

    low: Number
    """Smallest value; of whole numbers if both ends are whole."""
    high: Number
    """Largest value."""
    log: bool = False
    """Draw the logarithm evenly: for rates and sizes that span orders of magnitude."""
    step: Annotated[int | float, Field(gt=0)] | None = None
    """Only low, low + step, ...; null: any."""


class Choices(Section):
    """Values to choose from, for a search."""

    choices: Annotated[list[None | bool | int | float | str], Field(min_length=1)]
    """Numbers, words, true, false or null; a search sees no order in them."""


def _kind_of_axis(value: Any) -> str:
    if isinstance(value, dict | Section):
        return "choices" if "choices" in value or isinstance(value, Choices) else "range"
    return "values"


Values = Annotated[list[Any], Field(min_length=1)]
Axis = Annotated[
    Annotated[Values, Tag("values")] | Annotated[Range, Tag("range")] | Annotated[Choices, Tag("choices")],
    Discriminator(_kind_of_axis),
]
Sampler = Literal["grid", "random", "qmc", "tpe", "gp", "cmaes"]
Pruner = Literal["none", "median", "percentile", "successive_halving", "hyperband"]


class Sweep(Section):
    """One sweep."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The sweep folder is OUTPUT/NAME."""
    output: str = "runs"
    """Folder that the sweep folder is made in, from the working folder."""
    base: str
    """The experiment's YAML that trials start from, relative to this file."""
    set_: Annotated[dict[str, Any], Field(alias="set")] = {}
    """Settings of every trial on top of the base: {train.epochs: 3}."""
    space: dict[str, Axis] | list[dict[str, Any]]
    """What is varied: {setting: [values]} for a grid; {setting: {low, high}} or {choices} for a search; or the trials
    one by one, as a list of {setting: value}. The number of ranks is a setting too: launch.nproc.
    """
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = []
    """Every trial of a grid or list once with each of these seeds; empty: with the base's."""
    sampler: Sampler = "grid"
    """grid: every combination, or every trial listed; random, qmc, tpe, gp or cmaes: Optuna's, for a search."""
    sampler_args: Arguments = {}
    """Keyword arguments of Optuna's sampler, such as {n_startup_trials: 5}; null: none."""
    trials: Positive | None = None
    """How many trials a search makes."""
    pruner: Pruner = "none"
    """Optuna's rule for ending a trial early whose evaluations are worse than others' were at the same epoch."""
    pruner_args: Arguments = {}
    """Keyword arguments of Optuna's pruner, such as {n_warmup_steps: 2} (epochs); null: none."""
    metric: str | None = None
    """The evaluation metric that trials are judged by, at its best; null: the base's checkpoint.best_metric."""
    parallel: Positive = 1
    """Most trials at once; never more than cores (launch.nproc x launch.threads) or GPUs allow."""
    comparable: bool = True
    """Refuse trials whose results cannot be compared; false: only warn."""
    storage: str | None = None
    """Optuna's storage, such as postgresql://host/db; null: an SQLite file in the sweep folder."""

    @property
    def is_search(self) -> bool:
        return self.sampler != "grid"

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name


def axes(sweep: Sweep) -> list[str]:
    """The settings that differ between trials, in the order of the file."""
    if isinstance(sweep.space, dict):
        keys = list(sweep.space)
    else:
        keys = list(dict.fromkeys(key for trial in sweep.space for key in trial))
    return keys + (["seed"] if sweep.seeds else [])


def json_schema() -> str:
    """JSON Schema of a sweep file, for editors and ``configs/sweeps/schema.json``."""
    schema = Sweep.model_json_schema(by_alias=True)
    schema["title"] = "apex-harness sweep"
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"
