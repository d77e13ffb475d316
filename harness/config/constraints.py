"""Settings that cannot stand together, each with what to type instead. Whatever the machine, the data and the world."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from harness.config.schema import Config


class Conflict(NamedTuple):
    """Settings that cannot stand together: the dotted keys, what is wrong, and what to type instead."""

    keys: tuple[str, ...]
    message: str
    hint: str


def conflicts(config: Config) -> Iterator[Conflict]:
    """Every pair of settings in ``config`` that cannot stand together, whatever the machine and the data."""
    yield from _batch_conflicts(config)
    yield from _optimizer_conflicts(config)
    yield from _precision_conflicts(config)
    yield from (conflict for holds, conflict in IMPOSSIBLE if holds(config))
    if config.best_metric not in config.task.metrics:
        known = ", ".join(config.task.metrics)
        yield Conflict(
            ("checkpoint.best_metric", "task.name"),
            f"task {config.task.name} has no metric {config.best_metric!r}",
            f"use one of: {known}",
        )


def _batch_conflicts(config: Config) -> Iterator[Conflict]:
    batch = config.batch
    if (batch.global_ is None) == (batch.per_rank is None):
        seen = "neither is set" if batch.global_ is None else "both are set"
        yield Conflict(
            ("batch.global", "batch.per_rank"),
            f"the batch size must be said once, as batch.global or as batch.per_rank; {seen}",
            "for example batch.global=128 (rows of a step over all ranks)",
        )
    size = batch.global_ or batch.per_rank
    if size is not None and size % batch.accumulate:
        yield Conflict(
            ("batch.global", "batch.per_rank", "batch.accumulate"),
            f"{size} rows cannot be split into {batch.accumulate} equal micro-batches",
            f"make the batch a multiple of batch.accumulate, for example {size + -size % batch.accumulate}",
        )


def _optimizer_conflicts(config: Config) -> Iterator[Conflict]:
    optimizer, schedule, epochs = config.optimizer, config.schedule, config.train.epochs
    if (optimizer.lr_scaling != "none") != (optimizer.lr_base_batch is not None):
        yield Conflict(
            ("optimizer.lr_scaling", "optimizer.lr_base_batch"),
            "lr_scaling and lr_base_batch belong together",
            "set both (lr_base_batch is the global batch that lr was tuned for), or neither",
        )
    for key in ("lr", "momentum", "weight_decay"):
        if key in optimizer.args:
            yield Conflict(
                ("optimizer.args", f"optimizer.{key}"),
                f"{key} is a setting of its own and stands in optimizer.args too",
                f"write optimizer.{key} only",
            )
    if (schedule.name == "step") != bool(schedule.milestones):
        yield Conflict(
            ("schedule.name", "schedule.milestones"),
            f"schedule {schedule.name} with milestones {list(schedule.milestones)}",
            "milestones go with schedule.name=step, and step needs them: schedule.milestones=[30,60]",
        )
    if list(schedule.milestones) != sorted(set(schedule.milestones)):
        yield Conflict(("schedule.milestones",), "milestones must rise", "sort them")
    if schedule.warmup_epochs > epochs:
        yield Conflict(
            ("schedule.warmup_epochs", "train.epochs"),
            f"warm-up of {schedule.warmup_epochs} epochs in a run of {epochs}",
            "shorten schedule.warmup_epochs or raise train.epochs",
        )
    if schedule.min_lr > optimizer.lr:
        yield Conflict(
            ("schedule.min_lr", "optimizer.lr"),
            f"schedule.min_lr {schedule.min_lr} is above optimizer.lr {optimizer.lr}",
            "lower schedule.min_lr",
        )


def _precision_conflicts(config: Config) -> Iterator[Conflict]:
    precision = config.precision
    if precision.opt_level in ("O1", "O4"):
        for key in ("keep_batchnorm_fp32", "master_weights", "cast_model_type"):
            if getattr(precision, key) is not None:
                yield Conflict(
                    ("precision.opt_level", f"precision.{key}"),
                    f"{precision.opt_level} keeps the model in float32, so {key} has no meaning there",
                    f"remove precision.{key}, or use precision.opt_level=O2",
                )
    if precision.min_loss_scale is not None and precision.min_loss_scale > precision.max_loss_scale:
        yield Conflict(
            ("precision.min_loss_scale", "precision.max_loss_scale"),
            f"min_loss_scale {precision.min_loss_scale} is above max_loss_scale {precision.max_loss_scale}",
            "swap them",
        )
    if precision.backend == "apex" and config.runtime.device == "cpu":
        yield Conflict(
            ("precision.backend", "runtime.device"),
            "NVIDIA's Apex cannot run on a CPU",
            "use precision.backend=harness (or auto)",
        )


def _is_sharded(config: Config) -> bool:
    return config.parallel.strategy == "fsdp"


def _casts_weights(config: Config) -> bool:
    precision = config.precision
    cast = precision.cast_model_type not in (None, "float32")
    return precision.opt_level in ("O2", "O3", "O5") or cast or bool(precision.master_weights)


# What looks at a parameter as a whole, of which a rank under fsdp holds a part.
_LOOKS_AT_WHOLE_PARAMETERS = re.compile(r"fused_\w+|adafactor|muon|sparseadam|(harness\.)?apex\.optimizers\.\w+")

# Impossible combinations in parallel training. The number of processes is checked by harness.training.strategy.
IMPOSSIBLE: tuple[tuple[Callable[[Config], bool], Conflict], ...] = (
    (
        lambda config: _is_sharded(config) and _casts_weights(config),
        Conflict(
            ("parallel.strategy", "precision.opt_level"),
            "fsdp shards float32 weights, and this level keeps the model in half precision beside float32 masters",
            "use precision.opt_level=O1 (float16) or O4 (bfloat16), whose weights are the masters; or O0",
        ),
    ),
    (
        lambda config: _is_sharded(config) and config.model.channels_last,
        Conflict(
            ("parallel.strategy", "model.channels_last"),
            "fsdp cuts weights along their first dimension, which channels-last ones do not have in one piece",
            "use model.channels_last=false, or parallel.strategy=ddp",
        ),
    ),
    (
        lambda config: config.parallel.strategy in ("fsdp", "dp") and config.model.compile,
        Conflict(
            ("parallel.strategy", "model.compile"),
            "a model is compiled for the weights it has, and fsdp and dp exchange them in every pass",
            "use model.compile=false, or parallel.strategy=ddp",
        ),
    ),
    (
        lambda config: _is_sharded(config) and config.optimizer.larc is not None,
        Conflict(
            ("parallel.strategy", "optimizer.larc"),
            "LARC measures whole parameters, of which a rank holds a part under fsdp",
            "use parallel.strategy=ddp, or remove optimizer.larc",
        ),
    ),
    (
        lambda config: _is_sharded(config) and bool(_LOOKS_AT_WHOLE_PARAMETERS.fullmatch(config.optimizer.name)),
        Conflict(
            ("parallel.strategy", "optimizer.name"),
            "this optimizer works on whole parameters or flat buffers, and fsdp gives it shards",
            "use sgd, adam or adamw (optimizer.args={fused: true} for torch's fused kernel), or parallel.strategy=ddp",
        ),
    ),
    (
        lambda config: config.parallel.strategy == "dp" and config.parallel.sync_batchnorm,
        Conflict(
            ("parallel.sync_batchnorm", "parallel.strategy"),
            "sync_batchnorm is for several processes, and dp is one",
            "use parallel.strategy=ddp, with one process a device",
        ),
    ),
    (
        lambda config: config.precision.backend == "apex" and config.needs_our_amp,
        Conflict(
            ("precision.backend", "parallel.strategy", "parallel.sync_batchnorm", "optimizer.larc"),
            "fsdp, sync_batchnorm and larc are harness.apex's; NVIDIA's Apex does not know of shards and idle ranks",
            "use precision.backend=harness (or auto, which then means it)",
        ),
    ),
)
