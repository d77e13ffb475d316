"""The plan of a sweep, checked before anything starts: every configuration, the machine, and comparability.

The trials of a search are not known in advance; the corners of its space stand for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.config import loader
from harness.config.schema import Config
from harness.errors import ConfigError, plural
from harness.tools.sweep.comparability import Confounder, PlannedTrial, confounders
from harness.tools.sweep.slots import Machine, is_here, need
from harness.tools.sweep.spec import Settings, corners, grid, typed
from harness.tools.sweep.sweep_file import SweepFile
from harness.training import preflight


@dataclass(frozen=True)
class Plan:
    """A sweep that can be run. ``trials``: all of a grid, or the corners of a search."""

    file: SweepFile
    trials: list[PlannedTrial]
    metric: str
    direction: Literal["maximize", "minimize"]
    parallel: int
    engine: str | None
    machine: Machine
    notes: list[Confounder]

    @property
    def total(self) -> int:
        return self.file.spec.trials or len(self.trials)

    def words(self, settings: Settings) -> list[str]:
        """The ``key=value`` words that turn the base experiment into this trial, without its name and output."""
        return _words(self.file, self.engine, settings)

    def config_like(self, settings: Settings) -> Config:
        """A configuration with the settings that ``settings`` leaves open: trials of a list may set different keys."""
        return next(trial.config for trial in self.trials if trial.settings.keys() == settings.keys())

    def config(self, settings: Settings) -> Config:
        return loader.load(self.file.base, self.words(settings), self.file.origins)


def make(file: SweepFile, engine: str | None, parallel: int | None, machine: Machine) -> Plan:
    """Raises ConfigError with everything that keeps the sweep from running, or its trials from being compared."""
    spec = file.spec
    trials, problems = _load(file, engine, corners(spec) if spec.is_search else grid(spec))
    if not trials:
        raise _refused(file, problems)
    problems += _over_capacity(trials, machine)
    facts, wrong = _examine(file, engine, trials)
    problems += wrong
    most = parallel or spec.parallel
    at_once = most if is_here(trials[0].config) else 1  # on other machines trials do not share resources
    found = list(confounders(trials, at_once, lambda config: "batch norm" in facts[_preflight_key(config)]))
    refused = [each for each in found if each.refused and spec.comparable]
    problems += [f"{each.message}\n     -> {each.hint}" for each in refused]
    if refused:
        problems[-1] += (
            "\n     -> or, if this is intended, set comparable: false (comparable=false on the command line)"
        )
    if problems:
        raise _refused(file, problems)
    metric = trials[0].config.best_metric
    direction: Any = {"max": "maximize", "min": "minimize"}[trials[0].config.task.metrics[metric]]
    return Plan(file, trials, metric, direction, most, engine, machine, found)


def _words(file: SweepFile, engine: str | None, settings: Settings) -> list[str]:
    metric = {"checkpoint.best_metric": file.spec.metric} if file.spec.metric else {}
    launch = {"launch.engine": engine} if engine else {}
    return typed({**file.fixed, **metric, **launch, **settings})


def _load(file: SweepFile, engine: str | None, trials: Iterable[Settings]) -> tuple[list[PlannedTrial], list[str]]:
    """The trials whose configurations are valid, and the problems of the others, each problem once."""
    planned, wrong = [], dict[str, list[str]]()
    origins = {"checkpoint.best_metric": file.path, **file.origins}
    for settings in trials:
        try:
            planned.append(PlannedTrial(settings, loader.load(file.base, _words(file, engine, settings), origins)))
        except ConfigError as error:
            wrong.setdefault(str(error), []).append(" ".join(typed(settings)))
    return planned, [f"{problem}\n     in {_some(which)}" for problem, which in wrong.items()]


def _over_capacity(trials: Sequence[PlannedTrial], machine: Machine) -> list[str]:
    """Trials that this machine can never run."""
    wrong = dict[str, list[str]]()
    for trial in trials:
        if lacking := need(trial.config, machine).lacks(machine):
            wrong.setdefault(lacking, []).append(" ".join(typed(trial.settings)))
    return [
        f"this machine cannot run {_some(which)}: {lacking}\n"
        "     -> remove them from the space, or use --engine slurm or dask"
        for lacking, which in wrong.items()
    ]


def _examine(
    file: SweepFile, engine: str | None, trials: Sequence[PlannedTrial]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The result of ``harness check``, once for all trials that read the same data and build the same model."""
    facts: dict[str, dict[str, Any]] = {}
    wrong = dict[str, list[str]]()
    for trial in trials:
        if (key := _preflight_key(trial.config)) in facts:
            continue
        facts[key], found = preflight.examine(file.base, _words(file, engine, trial.settings), trial.world)
        if is_here(trial.config):  # files and devices of another machine cannot be checked from here
            for problem in found:
                wrong.setdefault(str(problem), []).append(" ".join(typed(trial.settings)))
    return facts, [f"{problem}\n     in {_some(which)}" for problem, which in wrong.items()]


def _preflight_key(config: Config) -> str:
    """Equal for configurations for which ``harness check`` has the same result."""
    tree = loader.as_tree(config)
    sections = {key: tree[key] for key in ("task", "data", "model", "batch", "precision", "parallel", "runtime")}
    optimizer = {**tree["optimizer"], "lr": None, "weight_decay": tree["optimizer"]["weight_decay"] is None}
    return json.dumps([sections, optimizer, config.launch.nnodes * config.launch.nproc], sort_keys=True)


def _some(which: Sequence[str], most: int = 3) -> str:
    more = f" and {plural(len(which) - most, 'more trial')}" if len(which) > most else ""
    return "; ".join(f"[{words}]" for words in which[:most]) + more


def _refused(file: SweepFile, problems: Sequence[str]) -> ConfigError:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = "\n".join(f"  {problem}" for problem in problems)
    return ConfigError(f"{count} in the sweep; nothing was started\n{lines}", where=file.path)
