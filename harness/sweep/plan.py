"""What a sweep would do, checked before anything runs: every trial's configuration, the machine, and comparability.

A search's trials are not known beforehand; the ends and choices of its space stand for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.config import loader
from harness.config.schema import Config
from harness.errors import ConfigError
from harness.sweep.comparability import Finding, Planned, findings
from harness.sweep.file import SweepFile
from harness.sweep.slots import Machine, is_here, need
from harness.sweep.space import Settings, corners, grid, typed
from harness.training import preflight


@dataclass(frozen=True)
class Plan:
    """A sweep that can be run. ``trials``: all of a grid; of a search, what stands for them."""

    file: SweepFile
    trials: list[Planned]
    metric: str
    direction: Literal["maximize", "minimize"]
    parallel: int
    engine: str | None
    machine: Machine
    notes: list[Finding]

    @property
    def total(self) -> int:
        return self.file.sweep.trials or len(self.trials)

    def words(self, settings: Settings) -> list[str]:
        """The ``key=value`` words that make the base experiment this trial, but for its name and place."""
        return typed({**_fixed(self.file, self.engine), **settings})

    def alike(self, settings: Settings) -> Config:
        """A configuration that has what ``settings`` leave out as theirs do: trials of a list may name other keys."""
        return next(trial.config for trial in self.trials if trial.settings.keys() == settings.keys())

    def config(self, settings: Settings) -> Config:
        return loader.load(self.file.base, self.words(settings), self.file.origins)


def make(file: SweepFile, engine: str | None, parallel: int | None, machine: Machine) -> Plan:
    """Raises ConfigError with everything that keeps the sweep from running, or its trials from being compared."""
    sweep = file.sweep
    trials, problems = _load(file, engine, corners(sweep) if sweep.is_search else grid(sweep))
    if not trials:
        raise _refused(file, problems)
    problems += _beyond(trials, machine)
    facts, wrong = _examine(file, engine, trials)
    problems += wrong
    most = parallel or sweep.parallel
    at_once = most if is_here(trials[0].config) else 1  # elsewhere each has places of its own
    found = list(findings(trials, at_once, lambda config: "batch norm" in facts[_built(config)]))
    refused = [finding for finding in found if finding.refused and sweep.comparable]
    problems += [f"{finding.message}\n     -> {finding.hint}" for finding in refused]
    if refused:
        problems[-1] += (
            "\n     -> or, if that is what is meant: comparable: false (comparable=false on the command line)"
        )
    if problems:
        raise _refused(file, problems)
    first = trials[0].config
    metric = first.best_metric
    direction: Any = {"max": "maximize", "min": "minimize"}[first.task.metrics[metric]]
    return Plan(file, trials, metric, direction, most, engine, machine, found)


def _fixed(file: SweepFile, engine: str | None) -> Settings:
    """What all trials have in common on top of the base."""
    metric = {"checkpoint.best_metric": file.sweep.metric} if file.sweep.metric else {}
    return {**file.fixed, **metric, **({"launch.engine": engine} if engine else {})}


def _load(file: SweepFile, engine: str | None, trials: Iterable[Settings]) -> tuple[list[Planned], list[str]]:
    """The trials whose configurations are valid, and what is wrong with the others, each problem once."""
    planned, wrong = [], dict[str, list[str]]()
    origins = {"checkpoint.best_metric": file.path, **file.origins}
    for settings in trials:
        try:
            config = loader.load(file.base, typed({**_fixed(file, engine), **settings}), origins)
            planned.append(Planned(settings, config))
        except ConfigError as error:
            wrong.setdefault(str(error), []).append(" ".join(typed(settings)))
    return planned, [f"{problem}\n     in {_some(which)}" for problem, which in wrong.items()]


def _beyond(trials: Sequence[Planned], machine: Machine) -> list[str]:
    """What this machine can never run, however long it waits."""
    wrong = dict[str, list[str]]()
    for trial in trials:
        if lacking := need(trial.config, machine).lacks(machine):
            wrong.setdefault(lacking, []).append(" ".join(typed(trial.settings)))
    return [
        f"this machine cannot run {_some(which)}: {lacking}\n"
        "     -> take them out of the space, or use --engine slurm or dask"
        for lacking, which in wrong.items()
    ]


def _examine(
    file: SweepFile, engine: str | None, trials: Sequence[Planned]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What ``harness check`` says, once for all trials that read the same data and build the same model."""
    facts: dict[str, dict[str, Any]] = {}
    wrong = dict[str, list[str]]()
    for trial in trials:
        if (key := _built(trial.config)) in facts:
            continue
        words = typed({**_fixed(file, engine), **trial.settings})
        facts[key], found = preflight.examine(file.base, words, trial.world)
        if is_here(trial.config):  # what another machine has cannot be seen from here
            for problem in found:
                wrong.setdefault(str(problem), []).append(" ".join(typed(trial.settings)))
    return facts, [f"{problem}\n     in {_some(which)}" for problem, which in wrong.items()]


def _built(config: Config) -> str:
    """The same for trials that ``harness check`` can say nothing different of."""
    tree = loader.as_tree(config)
    sections = {key: tree[key] for key in ("task", "data", "model", "batch", "precision", "parallel", "runtime")}
    optimizer = {**tree["optimizer"], "lr": None, "weight_decay": tree["optimizer"]["weight_decay"] is None}
    return json.dumps([sections, optimizer, config.launch.nnodes * config.launch.nproc], sort_keys=True)


def _some(which: Sequence[str], most: int = 3) -> str:
    more = f" and {len(which) - most} more trials" if len(which) > most else ""
    return "; ".join(f"[{words}]" for words in which[:most]) + more


def _refused(file: SweepFile, problems: Sequence[str]) -> ConfigError:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = "\n".join(f"  {problem}" for problem in problems)
    return ConfigError(f"{count} in the sweep; nothing was started\n{lines}", where=file.path)
