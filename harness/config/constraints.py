"""Settings that contradict each other regardless of machine and data, each with a fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from harness.config import plugins, targets
from harness.config.places import is_url
from harness.config.schema import Config
from harness.config.targets import LabelledTask
from harness.errors import ConfigError, plural


class Conflict(NamedTuple):
    """Settings that contradict each other: their dotted keys, the contradiction, and what to type instead."""

    keys: tuple[str, ...]
    message: str
    hint: str


def conflicts(config: Config) -> Iterator[Conflict]:
    """Every contradiction in ``config``. ``harness.training.strategy.check_world`` checks the number of ranks."""
    yield from _batch(config)
    yield from _optimizer(config)
    yield from _schedule(config)
    yield from _precision(config)
    yield from _parallel(config)
    yield from _compile(config)
    if config.parallel.strategy == "fsdp":
        yield from _fsdp(config)
    if isinstance(config.task, LabelledTask):
        for key, message, hint in targets.problems(config.task):
            yield Conflict._make(((key,), message, hint))
    yield from _checkpoint(config)
    if config.best_metric not in config.task.metrics:
        yield Conflict(
            ("checkpoint.best_metric", "task.name"),
            f"task {config.task.name} has no metric {config.best_metric!r}",
            f"use one of: {', '.join(config.task.metrics)}",
        )


def _batch(config: Config) -> Iterator[Conflict]:
    batch = config.batch
    if (batch.global_ is None) == (batch.per_rank is None):
        seen = "neither is set" if batch.global_ is None else "both are set"
        yield Conflict(
            ("batch.global", "batch.per_rank"),
            f"set exactly one of batch.global and batch.per_rank; {seen}",
            "for example batch.global=128 (rows per step over all ranks)",
        )
    size = batch.global_ or batch.per_rank
    if size is not None and size % batch.accumulate:
        yield Conflict(
            ("batch.global", "batch.per_rank", "batch.accumulate"),
            f"{plural(size, 'row')} cannot be split into {batch.accumulate} equal micro-batches",
            f"make the batch a multiple of batch.accumulate, for example {size + -size % batch.accumulate}",
        )


def _optimizer(config: Config) -> Iterator[Conflict]:
    optimizer = config.optimizer
    if (optimizer.lr_scaling != "none") != (optimizer.lr_base_batch is not None):
        yield Conflict(
            ("optimizer.lr_scaling", "optimizer.lr_base_batch"),
            "lr_scaling and lr_base_batch must be set together",
            "set both (lr_base_batch is the global batch that lr was tuned for), or neither",
        )
    for key in ("lr", "momentum", "weight_decay"):
        if key in optimizer.args:
            yield Conflict(
                ("optimizer.args", f"optimizer.{key}"),
                f"{key} has its own setting and cannot be in optimizer.args",
                f"set optimizer.{key} instead",
            )


def _schedule(config: Config) -> Iterator[Conflict]:
    schedule, epochs, args = config.schedule, config.train.epochs, dict(config.schedule.args)
    warmups = [f"schedule.{key}" for key in ("warmup_epochs", "warmup_steps") if getattr(schedule, key)]
    if len(warmups) == 2:
        yield Conflict(tuple(warmups), "both are set, but there is only one warm-up", "set one of them to 0")
    elif warmups and schedule.name == "one_cycle":
        yield Conflict(
            (warmups[0], "schedule.name"),
            "one_cycle has a warm-up of its own",
            "set this one to 0, and use schedule.args.pct_start, the share of all updates in which one_cycle rises",
        )
    if schedule.name == "one_cycle" and args["cycle_momentum"] and config.optimizer.momentum is not None:
        yield Conflict(
            ("optimizer.momentum", "schedule.args.cycle_momentum"),
            f"one_cycle varies the momentum from {args['max_momentum']} to {args['base_momentum']} and back, so "
            f"{config.optimizer.momentum} would not be used",
            "use optimizer.momentum=null, or schedule.args.cycle_momentum=false",
        )
    if schedule.name == "plateau" and config.train.patience and config.train.patience <= args["patience"]:
        yield Conflict(
            ("schedule.args.patience", "train.patience"),
            f"the run stops after {plural(config.train.patience, 'evaluation')} without a better metric, but the "
            f"learning rate would fall only after {args['patience'] + 1}",
            f"raise train.patience above {args['patience']}, or lower schedule.args.patience",
        )
    if schedule.warmup_epochs > epochs:
        yield Conflict(
            ("schedule.warmup_epochs", "train.epochs"),
            f"a warm-up of {schedule.warmup_epochs} epochs is longer than the run of {epochs}",
            "lower schedule.warmup_epochs or raise train.epochs",
        )
    if "." not in schedule.name and args.get("min_lr", 0.0) > config.optimizer.lr:
        yield Conflict(
            ("schedule.args.min_lr", "optimizer.lr"),
            f"schedule.args.min_lr {args['min_lr']} is above optimizer.lr {config.optimizer.lr}",
            "lower schedule.args.min_lr",
        )


def _precision(config: Config) -> Iterator[Conflict]:
    precision = config.precision
    if precision.opt_level in ("O1", "O4"):
        for key in ("keep_batchnorm_fp32", "master_weights", "cast_model_type"):
            if getattr(precision, key) is not None:
                yield Conflict(
                    ("precision.opt_level", f"precision.{key}"),
                    f"{precision.opt_level} keeps the model in float32, so {key} has no effect",
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
    if precision.backend == "apex" and config.needs_our_amp:
        yield Conflict(
            ("precision.backend", "parallel.strategy", "parallel.sync_batchnorm", "optimizer.larc"),
            "fsdp, sync_batchnorm and larc need harness.apex; NVIDIA's Apex does not support shards or uneven batches",
            "use precision.backend=harness (or auto, which selects it here)",
        )


def _parallel(config: Config) -> Iterator[Conflict]:
    strategy = config.parallel.strategy
    if strategy == "dp" and config.model.compile:
        yield Conflict(
            ("parallel.strategy", "model.compile"),
            "dp replaces the weights in every forward pass, but a compiled model is bound to its weights",
            "use model.compile=false, or parallel.strategy=ddp",
        )
    if strategy == "dp" and config.model.activation_checkpointing:
        yield Conflict(
            ("parallel.strategy", "model.activation_checkpointing"),
            "dp copies modules to each device, but a module recomputed in the backward pass stays on its own device",
            "use parallel.strategy=ddp, with one process per device",
        )
    types = [key for key in ("param_dtype", "reduce_dtype") if getattr(config.parallel, key) != "float32"]
    if types and strategy != "fsdp":
        yield Conflict(
            (f"parallel.{types[0]}", "parallel.strategy"),
            f"{types[0]} is the dtype in which fsdp sends data between ranks, but the strategy is {strategy}",
            "remove it (precision.opt_level then sets the dtypes), or use parallel.strategy=fsdp",
        )
    if strategy == "dp" and config.parallel.sync_batchnorm:
        yield Conflict(
            ("parallel.sync_batchnorm", "parallel.strategy"),
            "sync_batchnorm needs several processes, but dp runs in one",
            "use parallel.strategy=ddp, with one process per device",
        )


def _compile(config: Config) -> Iterator[Conflict]:
    """What torch's CUDA graphs, in both of its named modes, and kernels chosen by timing cannot be combined with."""
    mode = config.model.compile
    if mode == "max-autotune" and config.train.deterministic is True:
        yield Conflict(
            ("model.compile", "train.deterministic"),
            "max-autotune chooses kernels by timing them, so another start may compute with others",
            "use model.compile=reduce-overhead or true, or train.deterministic=false",
        )
    if isinstance(mode, str) and config.batch.accumulate > 1:
        yield Conflict(
            ("model.compile", "batch.accumulate"),
            f"{mode} replays CUDA graphs, whose gradients the next micro-batch would overwrite",
            "use model.compile=true, or batch.accumulate=1",
        )
    if isinstance(mode, str) and config.parallel.strategy == "fsdp":
        yield Conflict(
            ("model.compile", "parallel.strategy"),
            f"{mode} replays CUDA graphs on fixed memory, but fsdp gathers weights into new memory in every pass",
            "use model.compile=true, or parallel.strategy=ddp",
        )


def _checkpoint(config: Config) -> Iterator[Conflict]:
    name, strategy = config.checkpoint.format, config.parallel.strategy
    try:
        part = plugins.find("format", name, "checkpoint.format")
    except ConfigError as error:
        yield Conflict(("checkpoint.format",), error.message, error.hint)
        return
    if not getattr(part, "sharded", False):
        return
    if strategy != "fsdp":
        yield Conflict(
            ("checkpoint.format", "parallel.strategy"),
            f"a {name} checkpoint holds the shards of fsdp, but {strategy} has whole tensors",
            "use checkpoint.format=whole, or parallel.strategy=fsdp",
        )
    if is_url(config.output):
        yield Conflict(
            ("checkpoint.format", "output"),
            f"all ranks write a {name} checkpoint to one folder, but machines share no folder if output is a URL",
            "use checkpoint.format=whole, or set output to a folder that all machines share",
        )


# Optimizers that need complete parameters, for norms or flat buffers. Under fsdp each rank holds only a shard.
_NEEDS_WHOLE_PARAMETERS = re.compile(r"fused_\w+|adafactor|muon|sparseadam|(harness\.)?apex\.optimizers\.\w+")


def _fsdp(config: Config) -> Iterator[Conflict]:
    precision = config.precision
    if config.model.compile and config.parallel.param_dtype != "float32":
        yield Conflict(
            ("parallel.param_dtype", "model.compile"),
            "with bfloat16 weights, batch norms are gathered separately, which is impossible inside a compiled module",
            "use model.compile=false, or parallel.param_dtype=float32",
        )
    if precision.opt_level == "O1" and config.parallel.param_dtype == "bfloat16":
        yield Conflict(
            ("parallel.param_dtype", "precision.opt_level"),
            "O1 computes in float16, which would round the bfloat16 weights a second time",
            "use precision.opt_level=O4 or O0, or parallel.param_dtype=float32",
        )
    cast = precision.cast_model_type not in (None, "float32")
    if config.train.on_gradients:
        yield Conflict(
            ("parallel.strategy", "train.on_gradients"),
            "the function gets whole gradients, but under fsdp each rank holds only a shard of them",
            "use parallel.strategy=ddp, or remove train.on_gradients",
        )
    if precision.opt_level in ("O2", "O3", "O5") or cast or precision.master_weights:
        yield Conflict(
            ("parallel.strategy", "precision.opt_level"),
            "fsdp shards float32 weights, but these settings keep the model in half precision, with float32 masters",
            "use precision.opt_level=O1 (float16) or O4 (bfloat16), where the weights are the masters, or O0; O4 with "
            "parallel.param_dtype=bfloat16 corresponds to O5",
        )
    if config.model.channels_last:
        yield Conflict(
            ("parallel.strategy", "model.channels_last"),
            "fsdp shards weights along their first dimension, which is not contiguous in channels-last weights",
            "use model.channels_last=false, or parallel.strategy=ddp",
        )
    if config.optimizer.larc is not None:
        yield Conflict(
            ("parallel.strategy", "optimizer.larc"),
            "LARC needs the norms of complete parameters, but under fsdp each rank holds only a shard",
            "use parallel.strategy=ddp, or remove optimizer.larc",
        )
    if _NEEDS_WHOLE_PARAMETERS.fullmatch(config.optimizer.name):
        yield Conflict(
            ("parallel.strategy", "optimizer.name"),
            "this optimizer needs complete parameters or flat buffers, but fsdp passes it shards",
            "use sgd, adam or adamw, or parallel.strategy=ddp",
        )
