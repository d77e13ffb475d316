"""Settings that contradict each other regardless of machine and data, each with a fix."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config import plugins, schedules, targets
from harness.config.base import Conflict as Conflict  # also for strategies
from harness.config.places import is_url
from harness.config.schema import Config
from harness.errors import ConfigError, plural


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield every contradiction in ``config``, but for the number of ranks: ``check_world`` of the strategy does."""
    if config.train.epochs is None and config.train.max_steps is None:
        message = "train.epochs and train.max_steps are null, so training would never end"
        yield Conflict("train.epochs", message, "set one of them, for example train.epochs=10")
    yield from _batch(config)
    yield from _optimizer(config)
    yield from _schedule(config)
    yield from _precision(config)
    yield from _parallel(config)
    yield from _compile(config)
    of_task = [*config.task.conflicts()]
    yield from of_task
    if config.best_metric not in config.task.metrics and "task.metrics" not in {each.key for each in of_task}:
        metric = config.best_metric.removeprefix("eval_")  # as Hugging Face calls it
        suggestion = targets.suggestion(metric, config.task.metrics)
        yield Conflict(
            "checkpoint.best_metric",
            f"task {config.task.name} has no metric {config.best_metric!r}",
            f"{suggestion}use one of: {', '.join(config.task.metrics)}",
        )


def _batch(config: Config) -> Iterator[Conflict]:
    batch = config.batch
    if (batch.global_ is None) == (batch.per_rank is None):
        state = "neither is set" if batch.global_ is None else "both are set"
        yield Conflict(
            "batch.global",
            f"set exactly one of batch.global and batch.per_rank; {state}",
            "for example batch.global=128 (rows per step over all ranks)"
            if batch.global_ is None
            else f"batch.global=null batch.per_rank={batch.per_rank}; or batch.per_rank=null, to keep batch.global",
        )
    size = batch.global_ or batch.per_rank
    if size is not None and size % batch.accumulate:
        yield Conflict(
            "batch.global",
            f"{plural(size, 'row')} cannot be split into {batch.accumulate} equal micro-batches",
            f"make the batch a multiple of batch.accumulate, for example {size + -size % batch.accumulate}",
        )


def _optimizer(config: Config) -> Iterator[Conflict]:
    optimizer = config.optimizer
    if (optimizer.lr_scaling != "none") != (optimizer.lr_base_batch is not None):
        yield Conflict(
            "optimizer.lr_scaling",
            "lr_scaling and lr_base_batch must be set together",
            "set both (lr_base_batch is the global batch that lr was tuned for), or neither",
        )
    for key in ("lr", "momentum", "weight_decay"):
        if key in optimizer.args:
            yield Conflict(
                "optimizer.args",
                f"{key} has its own setting and cannot be in optimizer.args",
                f"set optimizer.{key} instead",
            )


def _schedule(config: Config) -> Iterator[Conflict]:
    schedule, epochs, args = config.schedule, config.train.epochs, dict(config.schedule.args)
    yield from schedules.find(schedule.name).conflicts(config)
    if epochs and schedule.warmup and schedule.warmup.unit == "epochs" and schedule.warmup.amount > epochs:
        yield Conflict(
            "schedule.warmup",
            f"a warm-up of {float(schedule.warmup.amount):g} epochs is longer than the run of {epochs}",
            "lower schedule.warmup or raise train.epochs",
        )
    if "." not in schedule.name and args.get("min_lr", 0.0) > config.optimizer.lr:
        yield Conflict(
            "schedule.args.min_lr",
            f"schedule.args.min_lr {args['min_lr']} is above optimizer.lr {config.optimizer.lr}",
            "lower schedule.args.min_lr",
        )


def _precision(config: Config) -> Iterator[Conflict]:
    precision = config.precision
    if precision.opt_level in ("O1", "O4") and precision.keep_batchnorm_fp32 is not None:
        yield Conflict(
            "precision.opt_level",
            f"{precision.opt_level} keeps the model in float32, so keep_batchnorm_fp32 has no effect",
            "remove precision.keep_batchnorm_fp32, or use precision.opt_level=O2",
        )
    if precision.min_loss_scale is not None and precision.min_loss_scale > precision.max_loss_scale:
        yield Conflict(
            "precision.min_loss_scale",
            f"min_loss_scale {precision.min_loss_scale} is above max_loss_scale {precision.max_loss_scale}",
            "swap them",
        )
    if precision.backend == "apex" and config.runtime.device == "cpu":
        yield Conflict(
            "precision.backend", "NVIDIA's Apex cannot run on a CPU", "use precision.backend=harness (or auto)"
        )


def _parallel(config: Config) -> Iterator[Conflict]:
    try:
        strategy = plugins.find("strategy", config.parallel.strategy, "parallel.strategy")
    except ConfigError as error:
        yield Conflict("parallel.strategy", error.message, error.hint)
        return
    yield from strategy.conflicts(config)
    if config.parallel.param_dtype != "float32" and not strategy.shards_weights:
        yield Conflict(
            "parallel.param_dtype",
            f"param_dtype is the dtype in which fsdp gathers weights, but the strategy is {config.parallel.strategy}",
            "remove it (precision.opt_level then sets the dtypes), or use parallel.strategy=fsdp",
        )
    if config.parallel.logical_ranks is not None:
        for setting, reason in needs_of_logical_ranks(config):
            yield Conflict("parallel.logical_ranks", reason, f"use {setting}, or remove parallel.logical_ranks")
    yield from _checkpoint(config, strategy.shards_weights)
    if config.precision.backend == "apex" and config.needs_our_amp:
        yield Conflict(
            "precision.backend",
            "fsdp, sync_batchnorm, logical_ranks and larc need harness.apex; NVIDIA's Apex does not support shards or "
            "uneven batches",
            "use precision.backend=harness (or auto, which selects it here)",
        )


def needs_of_logical_ranks(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (KEY=VALUE, the reason) for each setting that would make results depend on the number of processes, whether
    or not ``parallel.logical_ranks`` is set."""
    parallel = config.parallel
    if parallel.strategy != "ddp":
        yield "parallel.strategy=ddp", f"the sums of {parallel.strategy} have no fixed order"
    if parallel.sync_batchnorm:
        reason = "each logical rank normalizes its own rows, since one process computes several of them in turn"
        yield "parallel.sync_batchnorm=false", reason
    if not parallel.delay_allreduce:
        yield "parallel.delay_allreduce=true", "the gradients of logical ranks are summed after their backward passes"
    if config.train.deterministic is not True:
        yield "train.deterministic=true", "operations that are not deterministic have other bits at each start"
    if isinstance(config.model.compile, str):
        reason = f"{config.model.compile} replays CUDA graphs, whose gradients the next logical rank would overwrite"
        yield "model.compile=true", reason


def _compile(config: Config) -> Iterator[Conflict]:
    """Yield what the named modes cannot be combined with: both replay CUDA graphs, one also times kernels."""
    mode = config.model.compile
    if mode == "max-autotune" and config.train.deterministic is True:
        yield Conflict(
            "model.compile",
            "max-autotune chooses kernels by timing them, so another start may compute with others",
            "use model.compile=reduce-overhead or true, or train.deterministic=false",
        )
    if isinstance(mode, str) and config.batch.accumulate > 1:
        yield Conflict(
            "model.compile",
            f"{mode} replays CUDA graphs, whose gradients the next micro-batch would overwrite",
            "use model.compile=true, or batch.accumulate=1",
        )


def _checkpoint(config: Config, has_shards: bool) -> Iterator[Conflict]:
    """Yield what the checkpoint format cannot be combined with; ``has_shards``: whether the strategy has some."""
    name = config.checkpoint.format
    try:
        part = plugins.find("format", name, "checkpoint.format")
    except ConfigError as error:
        yield Conflict("checkpoint.format", error.message, error.hint)
        return
    if not getattr(part, "sharded", False):
        return
    if not has_shards:
        yield Conflict(
            "checkpoint.format",
            f"a {name} checkpoint holds the shards of fsdp, but {config.parallel.strategy} has whole tensors",
            "use checkpoint.format=whole, or parallel.strategy=fsdp",
        )
    if is_url(config.output):
        yield Conflict(
            "checkpoint.format",
            f"all ranks write a {name} checkpoint to one folder, but machines share no folder if output is a URL",
            "use checkpoint.format=whole, or set output to a folder that all machines share",
        )
