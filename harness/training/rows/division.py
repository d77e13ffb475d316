"""How the training rows are divided among ranks and steps: the sizes that follow, and what is wrong with them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from harness.config.schema import Config
from harness.data.shards import bounds, num_steps
from harness.errors import ConfigError, DataError, plural
from harness.training.optimizer import optimizer_builder, own_schedule
from harness.training.optimizer.schedule import Schedule
from harness.training.reproducibility.logical_ranks import LogicalRanks
from harness.training.task import OpenedTask

log = logging.getLogger("harness")

SKEWED = 0.5  # total variation distance between the labels of a shard and of all rows: of two disjoint halves


@dataclass(frozen=True)
class Sizes:
    """What follows from the configuration, the number of rows and that of ranks: batches, steps, and the schedule."""

    per_rank: int
    micro_batch: int
    """Rows of the largest forward pass of a rank, fewer than configured if the data has fewer."""
    global_batch: int
    eval_batch: int
    steps_per_epoch: int
    total_steps: int
    log_every: int
    save_every: int | None
    lr: float
    schedule: Schedule


def sizes_of(config: Config, num_rows: int, num_ranks: int) -> Sizes:
    """Return the sizes of a run. Raises ConfigError if ``num_ranks`` ranks cannot share the global batch or if the
    warm-up does not fit into the run, DataError if there are too few rows."""
    batch = config.batch
    if misfit := batch.misfit(num_ranks):
        raise ConfigError(misfit[0], where="batch.global", hint=misfit[1])
    per_rank = batch.per_rank if batch.global_ is None else batch.global_ // num_ranks
    assert per_rank is not None  # harness.config.constraints requires one of the two
    if not num_rows:
        raise DataError("the training dataset has no rows", where="task", hint="check what it reads, and its __len__()")
    if num_rows < num_ranks:
        hint = f"start at most {plural(num_rows, 'process')}"
        raise DataError(
            f"only {plural(num_rows, 'training row')} for {plural(num_ranks, 'rank')}", where="task", hint=hint
        )
    steps = num_steps(num_rows, num_ranks, per_rank, config.data.tail)
    if steps == 0:
        raise DataError(
            f"{plural(num_rows, 'training row')} cannot fill one global batch of {per_rank * num_ranks},"
            " and data.tail=drop discards incomplete batches",
            where="batch",
            hint="make the batch smaller, or set data.tail=use",
        )
    in_epochs = steps * config.train.epochs if config.train.epochs else None
    total_steps = min(filter(None, [in_epochs, config.train.max_steps]))
    lr = optimizer_builder.scaled_lr(config.optimizer, per_rank * num_ranks)
    schedule = own_schedule.build(config, lr / config.optimizer.lr, steps, total_steps)
    schedule.require_fit(in_epochs or total_steps)
    schedule.require_call()
    largest_shard = -(-num_rows // num_ranks)
    return Sizes(
        per_rank=per_rank,
        micro_batch=-(-min(per_rank, largest_shard) // batch.accumulate),
        global_batch=per_rank * num_ranks,
        eval_batch=batch.eval_per_rank or per_rank // batch.accumulate,
        steps_per_epoch=steps,
        total_steps=total_steps,
        log_every=config.train.log_every.steps(steps),
        save_every=None if config.checkpoint.every is None else config.checkpoint.every.steps(steps),
        lr=lr,
        schedule=schedule,
    )


def doubts(config: Config, sizes: Sizes, num_rows: int) -> Iterator[str]:
    """Yield warnings of what can be trained but is hardly meant. ``num_rows``: of the training data."""
    if num_rows < sizes.global_batch:
        yield (
            f"the global batch of {sizes.global_batch} is larger than the training data: each epoch is one step of "
            f"{plural(num_rows, 'row')}; make the batch smaller"
        )
    every = config.train.evaluate_every
    if every.unit == "epochs" and every.amount > max(1, -(-sizes.total_steps // sizes.steps_per_epoch)):
        yield (
            f"train.evaluate_every={every.written} is in epochs, and longer than the run: only its end is evaluated; "
            f"for steps, type train.evaluate_every='{every.amount} steps'"
        )
    interval = every.amount * (sizes.steps_per_epoch if every.unit == "epochs" else 1)
    num_evaluations = min(sizes.total_steps, math.ceil(sizes.total_steps / interval))
    if (patience := config.train.patience) and num_evaluations <= patience + 1:  # the first is always the best so far
        yield (
            f"train.patience={patience} cannot end this run early, which has {plural(num_evaluations, 'evaluation')}: "
            "lower train.evaluate_every, or remove it"
        )
    if config.train.min_delta and not config.train.patience:
        yield "train.min_delta changes nothing without train.patience"
    warmup = config.schedule.warmup
    if warmup and warmup.unit == "epochs" and not isinstance(warmup.written, str) and warmup.amount < Fraction(1, 2):
        yield (
            f"schedule.warmup={warmup.written} is in epochs: {plural(sizes.schedule.warmup_steps, 'step')} of "
            f"{sizes.total_steps}; a share of the run is schedule.warmup={float(100 * warmup.amount):g}%"
        )
    args, betas = dict(config.schedule.args), config.optimizer.args.get("betas")
    beta1 = betas[0] if betas and isinstance(betas, list | tuple) else None
    if config.schedule.name == "one_cycle" and args["cycle_momentum"] and beta1 not in (None, args["max_momentum"]):
        yield (
            f"one_cycle varies beta1 from {args['max_momentum']} to {args['base_momentum']} and back, not from the "
            f"{beta1} of optimizer.args.betas; to keep that, set schedule.args.cycle_momentum=false"
        )
    train_csv = getattr(config.task, "train_csv", None)
    if train_csv is not None and train_csv == getattr(config.task, "eval_csv", None):
        yield "task.eval_csv is task.train_csv: the metrics are those of rows that the model is trained on"


def warn_of_skew(config: Config, task: OpenedTask, ranks: LogicalRanks) -> None:
    """Warn if the labels of a rank's shard differ from all labels, which biases its gradients. Collective."""
    if config.data.shard != "contiguous" or ranks.num == 1:
        return
    parts = [bounds(len(task.train), rank, ranks.num) for rank in ranks.own]
    own_counts = ranks.runtime.patiently("counting labels", lambda: [task.label_counts(*part) for part in parts])
    shards = [shard for counts in ranks.runtime.gather(own_counts) for shard in counts if shard is not None]
    if len(shards) < ranks.num:
        return  # the task has no labels
    counts = np.stack(shards).astype(float)
    overall = counts.sum(0) / max(1.0, counts.sum())
    distance = np.abs(counts / np.maximum(1.0, counts.sum(1, keepdims=True)) - overall).sum(1) / 2
    if distance.max() >= SKEWED:
        log.warning(
            "the labels of rank %d differ strongly from the rest (distance %.2f out of 1): the CSV seems to be "
            "sorted by label. Use data.shard=global, or shuffle the CSV once.",
            int(distance.argmax()),
            distance.max(),
        )
