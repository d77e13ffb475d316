"""The plan of a sweep, checked before anything starts: every configuration, the machine, and comparability.

The trials of a search are not known in advance; the corners of its space stand for them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.config import loader
from harness.config.merge import typed
from harness.config.schema import Config
from harness.errors import ConfigError, plural
from harness.tools.sweep.slots import Machine, is_here, needed
from harness.tools.sweep.spec import Settings, SweepFile, corners, grid
from harness.training.check import preflight

log = logging.getLogger("harness")


@dataclass(frozen=True)
class PlannedTrial:
    """A trial to run: the settings that are its own, and its whole configuration."""

    settings: Settings
    config: Config

    @property
    def world(self) -> int:
        return self.config.launch.nnodes * self.config.launch.nproc

    @property
    def global_batch(self) -> int:
        batch = self.config.batch
        return batch.global_ or (batch.per_rank or 0) * self.world


@dataclass(frozen=True)
class Plan:
    """A sweep that can be run."""

    file: SweepFile
    trials: list[PlannedTrial]
    """All trials of a grid, or the corners of a search."""
    metric: str
    direction: Literal["maximize", "minimize"]
    machine: Machine
    notes: list[str]
    """What keeps the trials from being compared, with ``comparable: false``."""

    @property
    def total(self) -> int:
        return self.file.spec.trials or len(self.trials)

    def words(self, settings: Settings) -> list[str]:
        """Return the ``key=value`` words that turn the base experiment into this trial, without its name and output. An
        interrupted trial resumes, even if the base says ``checkpoint.resume: never``."""
        never = self.trials[0].config.checkpoint.resume == "never"
        return _words(self.file, {**settings, **({"checkpoint.resume": "auto"} if never else {})})

    def config(self, settings: Settings) -> Config:
        return loader.load(self.file.base, self.words(settings), self.file.origins)


def make(file: SweepFile, machine: Machine) -> Plan:
    """Return the plan of ``file``. Raises ConfigError with everything that keeps the sweep from running, or its trials
    from being compared."""
    spec = file.spec
    settings = corners(spec) if spec.is_search else grid(spec)
    log.info("checking %s", plural(len(settings), "trial"))
    trials, problems = _load(file, settings)
    if not trials:
        raise _refused(file, problems)
    problems += _over_capacity(trials, machine)
    facts, others = _examine(file, trials)
    problems += others
    found = list(confounders(trials, lambda config: "batch norm" in facts[_preflight_key(config)]))
    if found and spec.comparable:
        hint = "\n     -> or, if this is intended, set comparable: false (comparable=false on the command line)"
        problems += [*found[:-1], found[-1] + hint]
    if problems:
        raise _refused(file, problems)
    metric = trials[0].config.best_metric
    is_max = trials[0].config.task.metrics[metric] == "max"
    return Plan(file, trials, metric, "maximize" if is_max else "minimize", machine, found)


def _words(file: SweepFile, settings: Settings) -> list[str]:
    metric = {"checkpoint.best_metric": file.spec.metric} if file.spec.metric else {}
    return typed({**file.fixed, **metric, **settings})


def _load(file: SweepFile, trials: Iterable[Settings]) -> tuple[list[PlannedTrial], list[str]]:
    """Return the trials whose configurations are valid, and the problems of the others, each problem once."""
    planned, wrong = [], dict[str, list[str]]()
    origins = {"checkpoint.best_metric": file.path, **file.origins}
    for settings in trials:
        try:
            planned.append(PlannedTrial(settings, loader.load(file.base, _words(file, settings), origins)))
        except ConfigError as error:
            wrong.setdefault(str(error), []).append(" ".join(typed(settings)))
    return planned, _with_trials(wrong, len(planned) + sum(map(len, wrong.values())))


def _over_capacity(trials: Sequence[PlannedTrial], machine: Machine) -> list[str]:
    """Return a problem for each reason why this machine can never run some of ``trials``."""
    wrong = dict[str, list[str]]()
    for trial in trials:
        if lacking := needed(trial.config, machine).lacks(machine):
            wrong.setdefault(lacking, []).append(" ".join(typed(trial.settings)))
    return [
        f"this machine cannot run {_some(which)}: {lacking}\n"
        "     -> remove them from the space, or use launch.engine=slurm or dask"
        for lacking, which in wrong.items()
    ]


def _examine(file: SweepFile, trials: Sequence[PlannedTrial]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the result of ``harness check``, once for all trials that read the same data and build the same model."""
    facts: dict[str, dict[str, Any]] = {}
    wrong = dict[str, list[str]]()
    for trial in trials:
        if (key := _preflight_key(trial.config)) in facts:
            continue
        checked = preflight.examine(file.base, _words(file, trial.settings), trial.world, written_at=file.origins)
        facts[key] = checked.facts
        if is_here(trial.config):  # files and devices of another machine cannot be checked from here
            for error in checked.errors:
                wrong.setdefault(str(error), []).append(" ".join(typed(trial.settings)))
    return facts, _with_trials(wrong, len(facts))


def _preflight_key(config: Config) -> str:
    """Return a text that is equal for configurations for which ``harness check`` has the same result."""
    tree = loader.as_tree(config)
    sections = {key: tree[key] for key in ("task", "data", "model", "batch", "precision", "parallel", "runtime")}
    optimizer = {**tree["optimizer"], "lr": None, "weight_decay": tree["optimizer"]["weight_decay"] is None}
    return json.dumps([sections, optimizer, config.launch.nnodes * config.launch.nproc], sort_keys=True)


def _with_trials(wrong: Mapping[str, Sequence[str]], total: int) -> list[str]:
    """Return each problem with the trials that have it, unless all of ``total`` have."""
    return [
        problem if len(which) == total else f"{problem}\n     in {_some(which)}" for problem, which in wrong.items()
    ]


def _some(which: Sequence[str], most: int = 3) -> str:
    more = f" and {plural(len(which) - most, 'more trial')}" if len(which) > most else ""
    return "; ".join(f"[{words}]" for words in which[:most]) + more


def _refused(file: SweepFile, problems: Sequence[str]) -> ConfigError:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = "\n".join(f"  {problem}" for problem in problems)
    return ConfigError(f"{count} in the sweep; nothing was started\n{lines}", where=file.path)


# Comparability
#
# Two trials are comparable if they differ only in the varied settings and their direct effects: they train on the same
# number of samples, in the same order, in global batches of the same size at any world size.


def confounders(trials: Sequence[PlannedTrial], has_batch_norm: Callable[[Config], bool]) -> Iterator[str]:
    """Yield every difference that keeps ``trials`` from being compared, with its remedy."""
    if len({trial.world for trial in trials}) > 1:
        yield from _world_sizes(trials, has_batch_norm)
    # None: whole epochs
    samples = {t.config.train.max_steps * t.global_batch if t.config.train.max_steps else None for t in trials}
    if len(samples) > 1 and len(_distinct(trials, "train.max_steps")) == 1:  # not chosen
        yield (
            f"train.max_steps and the batch give trials different numbers of samples ({_listed(samples)})\n"
            "     -> set: {train.max_steps: null} and use train.epochs: the number of samples is then the same at any "
            "batch size"
        )
    if len(_distinct(trials, "task.name")) > 1:
        yield "trials of different tasks have no common metric\n     -> write one sweep per task"


def _world_sizes(trials: Sequence[PlannedTrial], has_batch_norm: Callable[[Config], bool]) -> Iterator[str]:
    """Yield what depends on the world size, with its remedy."""
    if any(trial.config.batch.per_rank for trial in trials):
        yield (
            "with batch.per_rank the global batch depends on the world size\n"
            "     -> set: {batch.per_rank: null} and vary batch.global, the rows of a step over all ranks"
        )
    if shards := _distinct(trials, "data.shard") - {"global"}:
        yield (
            f"with data.shard={_listed(shards)} the data order depends on the world size\n"
            "     -> set: {data.shard: global}"
        )
    if any(not trial.config.parallel.sync_batchnorm and has_batch_norm(trial.config) for trial in trials):
        yield (
            "batch norm uses the rows of one rank, so its batches differ between world sizes\n"
            "     -> set: {parallel.sync_batchnorm: true}"
        )


def _distinct(trials: Sequence[PlannedTrial], key: str) -> set[Any]:
    """Return the values of the setting ``section.name`` among the trials."""
    section, name = key.split(".")
    return {getattr(getattr(trial.config, section), name) for trial in trials}


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(values)))
