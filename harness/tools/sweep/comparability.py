"""Rules for fair comparisons: finds differences between trials that confound what is varied. Pure functions.

Two trials are comparable if they differ only in the varied settings and their direct effects: they train on the same
number of samples, in the same order, in global batches of the same size at any world size, from the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.schema import Config
from harness.errors import plural
from harness.tools.sweep.spec import Settings, identity
from harness.training.optim import scaled_lr


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
class Confounder:
    """A difference that keeps trials from being compared. ``refused``: not run unless ``comparable: false``."""

    refused: bool
    message: str
    hint: str


def confounders(
    trials: Sequence[PlannedTrial], parallel: int, has_batch_norm: Callable[[Config], bool]
) -> Iterator[Confounder]:
    """Every confounder among ``trials`` of which up to ``parallel`` run at once."""
    yield from _world_sizes(trials, parallel, has_batch_norm)
    yield from _samples(trials)
    yield from _seeds(trials)
    yield from _learning_rates(trials)
    if len(_distinct(trials, "train.evaluate_every")) > 1:
        yield Confounder(
            False,
            "trials are evaluated at different intervals; more evaluations tend to give a better best value by chance",
            "set: {train.evaluate_every: 1}",
        )
    if len(_distinct(trials, "task.name")) > 1:
        yield Confounder(True, "trials of different tasks have no common metric", "write one sweep per task")
    for key in ("launch.threads", "runtime.device"):
        if len(values := _distinct(trials, key)) > 1:
            yield Confounder(
                False, f"trials differ in {key} ({_listed(values)}), so their times are not comparable", "use one value"
            )


def _world_sizes(
    trials: Sequence[PlannedTrial], parallel: int, has_batch_norm: Callable[[Config], bool]
) -> Iterator[Confounder]:
    worlds = sorted({trial.world for trial in trials})
    if len(worlds) == 1:
        return
    batches = {world: sorted({t.global_batch for t in trials if t.world == world}) for world in worlds}
    if len({tuple(sizes) for sizes in batches.values()}) > 1:
        seen = "; ".join(f"{plural(world, 'rank')}: {_listed(sizes)}" for world, sizes in batches.items())
        yield Confounder(
            True,
            f"world sizes have different global batches ({seen})",
            "set: {batch.per_rank: null} and vary batch.global, the rows of a step over all ranks"
            if any(trial.config.batch.per_rank for trial in trials)
            else "give every world size the same values of batch.global",
        )
    if shards := _distinct(trials, "data.shard") - {"global"}:
        yield Confounder(
            True,
            f"with data.shard={_listed(shards)} the data order depends on the world size",
            "set: {data.shard: global}",
        )
    if any(not trial.config.parallel.sync_batchnorm and has_batch_norm(trial.config) for trial in trials):
        yield Confounder(
            True,
            "batch norm uses the rows of one rank, so its batches differ between world sizes",
            "set: {parallel.sync_batchnorm: true}",
        )
    if parallel > 1:
        yield Confounder(
            False,
            f"up to {parallel} trials at once share memory and caches, so their times are not comparable",
            "use parallel: 1 for comparable times",
        )


def _samples(trials: Sequence[PlannedTrial]) -> Iterator[Confounder]:
    epochs = _distinct(trials, "train.epochs")
    # None: whole epochs
    samples = {t.config.train.max_steps * t.global_batch if t.config.train.max_steps else None for t in trials}
    if len(samples) > 1:
        counts = ", ".join(str(count) if count else "whole epochs" for count in sorted(samples, key=lambda n: n or 0))
        yield Confounder(
            not _is_varied(trials, "train.max_steps") or len(_distinct(trials, "train.max_steps")) == 1,
            f"train.max_steps and the batch give trials different numbers of samples ({counts})",
            "set: {train.max_steps: null} and use train.epochs: the number of samples is then the same at any batch "
            "size",
        )
    if len(epochs) > 1:
        yield Confounder(
            not _is_varied(trials, "train.epochs"),
            f"trials train on different numbers of samples: {_listed(epochs)} epochs",
            "compare them after equal numbers of samples, not at the end of training",
        )
    if any(trial.config.train.patience for trial in trials):
        yield Confounder(
            False,
            "train.patience stops trials at different epochs, after different numbers of samples",
            "set: {train.patience: null}",
        )
    if len({trial.global_batch for trial in trials}) > 1 and "drop" in _distinct(trials, "data.tail"):
        yield Confounder(
            False, "with data.tail=drop, a larger batch drops more rows per epoch", "set: {data.tail: use}"
        )


def _seeds(trials: Sequence[PlannedTrial]) -> Iterator[Confounder]:
    seeds: dict[str, set[int]] = {}
    for trial in trials:
        rest = {key: value for key, value in trial.settings.items() if key != "seed"}
        seeds.setdefault(identity(rest), set()).add(trial.config.seed)
    if len({frozenset(found) for found in seeds.values()}) > 1:
        yield Confounder(
            True,
            "trials have different seeds, so differences may be due to chance",
            "remove the seed from the space, and write seeds: [0, 1, 2] to train every trial with each",
        )


def _learning_rates(trials: Sequence[PlannedTrial]) -> Iterator[Confounder]:
    rules = _distinct(trials, "optimizer.lr_scaling") - {"none"}
    applied: dict[float, set[float]] = {}
    for trial in trials:
        optimizer = trial.config.optimizer
        applied.setdefault(optimizer.lr, set()).add(scaled_lr(optimizer, trial.global_batch))
    scaled = [(lr, rates) for lr, rates in applied.items() if len(rates) > 1]
    if rules and scaled:
        lr, rates = scaled[0]
        yield Confounder(
            False,
            f"optimizer.lr_scaling={_listed(rules)} turns optimizer.lr={lr:g} into "
            f"{_listed(f'{rate:g}' for rate in sorted(rates))}, depending on the batch",
            "set: {optimizer.lr_scaling: none, optimizer.lr_base_batch: null} to vary the applied rate",
        )


def _distinct(trials: Sequence[PlannedTrial], key: str) -> set[Any]:
    """The values of the setting ``section.name`` among the trials."""
    section, name = key.split(".")
    return {getattr(getattr(trial.config, section), name) for trial in trials}


def _is_varied(trials: Sequence[PlannedTrial], key: str) -> bool:
    return any(key in trial.settings for trial in trials)


def _listed(values: Any) -> str:
    return ", ".join(map(str, values if isinstance(values, list) else sorted(values, key=str)))
