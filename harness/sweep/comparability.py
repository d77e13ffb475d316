"""What of the trials of a sweep cannot be compared, and what to type so that it can. Pure rules over configurations.

Two trials are comparable if they differ in what is varied and in nothing that comes along with it: they see the same
number of samples, in the same order, in global batches of the same size whatever the world size, from the same seed.
A ``refused`` finding means that the difference between two trials has more than one cause; a note is worth knowing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.schema import Config
from harness.sweep.space import Settings, identity
from harness.training.optim import scaled_lr


@dataclass(frozen=True)
class Planned:
    """A trial that is to be run: what it has of its own, and all of its configuration."""

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
class Finding:
    """``refused``: not run unless ``comparable: false``."""

    refused: bool
    message: str
    hint: str


def findings(trials: Sequence[Planned], parallel: int, has_batch_norm: Callable[[Config], bool]) -> Iterator[Finding]:
    """Everything that stands between ``trials`` and a fair comparison, if up to ``parallel`` run at once."""
    yield from _worlds(trials, parallel, has_batch_norm)
    yield from _samples(trials)
    yield from _seeds(trials)
    yield from _rates(trials)
    yield from _evaluations(trials)
    yield from _clocks(trials)


def _worlds(trials: Sequence[Planned], parallel: int, has_batch_norm: Callable[[Config], bool]) -> Iterator[Finding]:
    worlds = sorted({trial.world for trial in trials})
    if len(worlds) == 1:
        return
    batches = {world: sorted({t.global_batch for t in trials if t.world == world}) for world in worlds}
    if len({tuple(sizes) for sizes in batches.values()}) > 1:
        seen = "; ".join(f"{world} ranks: {_listed(sizes)}" for world, sizes in batches.items())
        per_rank = any(trial.config.batch.per_rank for trial in trials)
        yield Finding(
            True,
            f"world sizes have different global batches ({seen})",
            "set: {batch.per_rank: null} and vary batch.global, the rows of a step over all ranks"
            if per_rank
            else "give every world size the same values of batch.global",
        )
    shards = {trial.config.data.shard for trial in trials} - {"global"}
    if shards:
        yield Finding(
            True,
            f"with data.shard={_listed(shards)} the order of the data depends on the world size",
            "set: {data.shard: global}",
        )
    if any(not trial.config.parallel.sync_batchnorm and has_batch_norm(trial.config) for trial in trials):
        yield Finding(
            True,
            "batch norm sees the rows of its rank alone, and so other batches at each world size",
            "set: {parallel.sync_batchnorm: true}",
        )
    if parallel > 1:
        yield Finding(
            False,
            f"up to {parallel} trials at once share memory and caches: their times say less about world sizes",
            "parallel: 1 for times that can be compared",
        )


def _samples(trials: Sequence[Planned]) -> Iterator[Finding]:
    limits = {trial.config.train.max_steps for trial in trials}
    epochs = {trial.config.train.epochs for trial in trials}
    samples = {
        (trial.config.train.max_steps or 0) * trial.global_batch if trial.config.train.max_steps else None
        for trial in trials
    }
    if len(samples) > 1:
        asked = _is_axis(trials, "train.max_steps")
        counts = ", ".join(str(count) if count else "whole epochs" for count in sorted(samples, key=lambda n: n or 0))
        yield Finding(
            not asked or len(limits) == 1,
            f"train.max_steps and the batch give trials different numbers of samples ({counts})",
            "set: {train.max_steps: null} and say train.epochs, which are the same samples at any batch",
        )
    if len(epochs) > 1:
        yield Finding(
            not _is_axis(trials, "train.epochs"),
            f"trials see different numbers of samples: {_listed(epochs)} epochs",
            "compare them by sample, not by their end",
        )
    if any(trial.config.train.patience for trial in trials):
        yield Finding(
            False,
            "train.patience ends trials at different epochs, so that they see different numbers of samples",
            "set: {train.patience: null}",
        )
    if len({trial.global_batch for trial in trials}) > 1 and any(t.config.data.tail == "drop" for t in trials):
        yield Finding(
            False,
            "with data.tail=drop an epoch has fewer rows the larger the batch",
            "set: {data.tail: use}",
        )


def _seeds(trials: Sequence[Planned]) -> Iterator[Finding]:
    seeds: dict[str, set[int]] = {}
    for trial in trials:
        rest = {key: value for key, value in trial.settings.items() if key != "seed"}
        seeds.setdefault(identity(rest), set()).add(trial.config.seed)
    if len({frozenset(found) for found in seeds.values()}) > 1:
        yield Finding(
            True,
            "trials have different seeds: what differs between them may be chance",
            "leave the seed out of the space, and write seeds: [0, 1, 2] to train every trial with each",
        )


def _rates(trials: Sequence[Planned]) -> Iterator[Finding]:
    scalings = {trial.config.optimizer.lr_scaling for trial in trials}
    if scalings == {"none"}:
        return
    applied: dict[float, set[float]] = {}
    for trial in trials:
        optimizer = trial.config.optimizer
        applied.setdefault(optimizer.lr, set()).add(scaled_lr(optimizer, trial.global_batch))
    for lr, rates in applied.items():
        if len(rates) > 1:
            yield Finding(
                False,
                f"optimizer.lr_scaling={_listed(scalings - {'none'})} turns optimizer.lr={lr:g} into "
                f"{_listed(f'{rate:g}' for rate in sorted(rates))}, depending on the batch",
                "set: {optimizer.lr_scaling: none, optimizer.lr_base_batch: null} to vary the rate that is applied",
            )
            return


def _evaluations(trials: Sequence[Planned]) -> Iterator[Finding]:
    if len({trial.config.train.evaluate_every for trial in trials}) > 1:
        yield Finding(
            False,
            "trials are evaluated more or less often, and the best of more evaluations is better by chance",
            "set: {train.evaluate_every: 1}",
        )
    if len({trial.config.task.name for trial in trials}) > 1:
        yield Finding(True, "trials of different tasks have no metric in common", "one sweep for each task")


def _clocks(trials: Sequence[Planned]) -> Iterator[Finding]:
    for what, values in (
        ("launch.threads", {trial.config.launch.threads for trial in trials}),
        ("runtime.device", {trial.config.runtime.device for trial in trials}),
    ):
        if len(values) > 1:
            yield Finding(
                False, f"trials differ in {what} ({_listed(values)}), and so do their times", "give all the same"
            )


def _is_axis(trials: Sequence[Planned], key: str) -> bool:
    return any(key in trial.settings for trial in trials)


def _listed(values: Any) -> str:
    return ", ".join(map(str, values if isinstance(values, list) else sorted(values, key=str)))
