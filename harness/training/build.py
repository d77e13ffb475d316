"""Assemble a run, in an order of which comments give the reasons."""

from __future__ import annotations

import copy
import logging
import time
from contextlib import ExitStack

import numpy as np
import torch
from torch import nn

from harness.config import loader
from harness.config.schema import Config
from harness.data.batch import read
from harness.data.loader import Loader
from harness.data.rank_data import EvalData, TrainData
from harness.data.seeds import Purpose
from harness.data.shards import bounds
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import first_line
from harness.runs import borrowed, checkpoint, hub_copies
from harness.runs.console import ProgressBar
from harness.runs.run_dir import RunFolder
from harness.trackers import metrics_log
from harness.training import hooks
from harness.training.checkpoints import resuming
from harness.training.checkpoints.checkpoint_writer import CheckpointWriter
from harness.training.health import Health
from harness.training.measuring import memory
from harness.training.measuring.meter import Meter
from harness.training.model import model_builder, recompute
from harness.training.optimizer import on_gradients, optimizer_builder, precision, registry, trained_parameters
from harness.training.optimizer.ema import Ema
from harness.training.optimizer.on_gradients import OnGradients
from harness.training.reproducibility import determinism, rng
from harness.training.reproducibility.determinism import kernels
from harness.training.reproducibility.logical_ranks import LogicalRanks
from harness.training.rows import mixing, opening
from harness.training.rows.coverage import Coverage
from harness.training.rows.division import Sizes, doubts, sizes_of, warn_of_skew
from harness.training.rows.first_look import FirstLook
from harness.training.run import Run, ThisStart
from harness.training.state import State
from harness.training.strategies import sharding
from harness.training.strategies.base import ParallelStrategy, strategy_class
from harness.training.task import OpenedTask, SupportsLook, laid_out

log = logging.getLogger("harness")


def build(config: Config, runtime: Runtime, folder: RunFolder, stop: Stop) -> Run:
    """Build everything the loop needs, restored from the checkpoint to resume from, if there is one. An error closes
    what was opened. Collective."""
    determinism.require(config.train.deterministic)
    determinism.set_tf32(config.precision)
    if config.parallel.logical_ranks is not None:  # a launcher's default depends on the number of processes
        torch.set_num_threads(config.launch.threads)
    num_threads = torch.get_num_threads()
    with ExitStack() as cleanup:
        with runtime.together("finding the parts"):  # first: an error in them is seen before the data is read
            rng.seed_all(Purpose.INITIAL_WEIGHTS, config.seed)  # for what their constructors draw
            own_hooks = hooks.build(config.hooks)
            resumes = bool(config.checkpoint.named or checkpoint.steps(folder.checkpoints.folder))
            require_optimizer(config)
            require_model(config, weights=runtime.rank == 0 and not resumes)
            located = hub_copies.with_copies(config, folder.path) if resumes else config
        task = opening.open_task(located, runtime)
        for note in runtime.patiently("looking at the data", lambda: task.notes if runtime.rank == 0 else ()):
            log.warning("%s", note)
        with runtime.together("opening the trackers"):
            tracker = metrics_log.open_log(folder.metrics, runtime.rank, config, loader.to_text(config))
            cleanup.callback(tracker.close)
        ranks, sizes = divide(config, task, runtime)
        opening.copy_files(config, task, runtime)
        parallel, model = strategy_and_model(located, task, ranks)
        start_weights = load_start_weights(config, runtime, folder, model, task)
        model = place(config, parallel, model, has_start_weights=bool(start_weights))
        optimizer, ema, gradient_hook = with_optimizer(config, parallel, model, sizes)
        train_data, eval_data = open_loaders(config, task, parallel, sizes, stop, cleanup)
        writer = CheckpointWriter(runtime, folder.checkpoints, config.checkpoint.async_save, folder.publish)
        cleanup.callback(writer.close)
        run = Run(
            config=config, runtime=runtime, folder=folder, stop=stop, task=task, sizes=sizes,
            train_data=train_data, eval_data=eval_data, parallel=parallel, optimizer=optimizer,
            ema=ema, gradient_hook=gradient_hook, writer=writer, tracker=tracker,
            health=Health(config, runtime, parallel.precision, parallel.module, ema, optimizer, folder.where),
            progress=ProgressBar(runtime.rank, sizes.total_steps), state=State(),
            meter=Meter(runtime.device, len(ranks.own)), hooks=own_hooks,
            coverage=Coverage(len(task.train), config.seed),
            this_start=ThisStart(time.perf_counter(), num_threads, start_weights),
        )  # fmt: skip
        resuming.resume(run)
        if not run.state.evaluated and isinstance(task, SupportsLook):
            shares = [bounds(len(task.eval), rank, ranks.num) for rank in (ranks.own[0], ranks.own[-1])]
            run.first_look = FirstLook(task, range(shares[0][0], shares[-1][1]))
        cleanup.pop_all()
    return run


def require_optimizer(config: Config) -> None:
    """Raise ConfigError if there is no such optimizer, or if the strategy allows none of its kind."""
    registry.find(config.optimizer.name, strategy_class(config.parallel).shards_weights)


def require_model(config: Config, weights: bool = True) -> None:
    """Raise ConfigError if there is no such model or, with ``weights``, no such file of its weights."""
    name, chosen = config.model.name, config.model.start_weights
    if "." not in config.task.name:  # the user's own task may have models of its own
        model_builder.find(name)
    if weights and chosen is not None:
        from harness.training.model import weights as files  # late: few runs need it

        files.located(chosen, name)


def divide(config: Config, task: OpenedTask, runtime: Runtime) -> tuple[LogicalRanks, Sizes]:
    """Divide the rows among the ranks; warn if there are few, or if the shards differ in their labels. Collective."""
    with runtime.together("dividing the batch"):
        strategy_class(config.parallel).check_world(config.parallel, runtime.world_size)
        ranks = LogicalRanks(runtime, config.parallel.logical_ranks)
        sizes = sizes_of(config, len(task.train), ranks.num)
    if ranks.fixed:
        runtime.all_equal(
            kernels(runtime.device),
            "what the last bits of a result depend on",
            "start all ranks on machines of one kind, or remove parallel.logical_ranks",
        )
    for doubt in doubts(config, sizes, len(task.train)):
        log.warning("%s", doubt)
    warn_of_skew(config, task, ranks)
    return ranks, sizes


def strategy_and_model(config: Config, task: OpenedTask, ranks: LogicalRanks) -> tuple[ParallelStrategy, nn.Module]:
    """Build the strategy, with amp in it, and the model on the CPU. Collective."""
    runtime = ranks.runtime
    with runtime.announced("building the model"), runtime.together("building the model"):
        amp = precision.choose(config.precision, runtime.device, config.needs_our_amp)
        parallel = strategy_class(config.parallel)(config.parallel, amp, ranks)
        model = _without_values(config, task) if parallel.holds_shard and runtime.rank else build_model(config, task)
        determinism.require_restorable(model, runtime.device, config.train.deterministic)
        recompute.apply(model, config.model.activation_checkpointing)
        require_mixable(config, task)
    return parallel, model


def load_start_weights(
    config: Config, runtime: Runtime, folder: RunFolder, model: nn.Module, task: OpenedTask
) -> dict[str, object]:
    """Load ``model.weights`` on rank 0, if this start is the first; return their source and hash. Collective."""
    if config.model.start_weights is None:
        return {}
    from harness.training.model import weights  # late: few runs need it

    return weights.start(model, config, runtime, folder.checkpoints.folder, task)


def place(config: Config, parallel: ParallelStrategy, model: nn.Module, has_start_weights: bool) -> nn.Module:
    """Move the model to its device, equal on all ranks, and let the strategy replace modules and parameters.
    Collective."""
    runtime = parallel.ranks.runtime
    if parallel.holds_shard:  # ``prepare`` moves it in parts
        runtime.all_equal(sharding.layout(model), "the model", "its layers must not depend on the rank or on chance")
    else:
        with runtime.together("moving the model to its device"):
            model = model.to(runtime.device)
            if config.model.channels_last:
                model = model.to(memory_format=torch.channels_last)  # before amp, which copies weights as they are
        if has_start_weights:
            sharding.replicate(model)
    return parallel.prepare(model)


def with_optimizer(
    config: Config, parallel: ParallelStrategy, model: nn.Module, sizes: Sizes
) -> tuple[torch.optim.Optimizer, Ema | None, OnGradients | None]:
    """Build the optimizer, the moving average and the user's function on gradients for ``model``, initialize amp, and
    wrap and compile the model. Collective."""
    amp = parallel.precision
    with parallel.ranks.runtime.together("building the optimizer"):
        # After ``place``, which makes the parameters that the optimizer holds.
        optimizer, gradient_hook = _make_optimizer(config, model, sizes, parallel.device)
        trained = [param for group in optimizer.param_groups for param in group["params"]]
        if config.optimizer.larc is not None:
            optimizer = amp.larc(optimizer, config.optimizer.larc)
        model, optimizer = amp.initialize(model, optimizer)
        optimizer_builder.start_momentum(optimizer)
    # After amp, which changes the types of the weights whose gradients are averaged.
    parallel.wrap(model)
    ema = None
    if config.train.ema_decay:
        ema = Ema(trained, list(amp.master_params(optimizer)), config.train.ema_decay)
    if config.model.compile:
        # After amp, whose casts are to be compiled too.
        parallel.compile(None if config.model.compile is True else config.model.compile)
    memory.keep_freed_memory(parallel.device)
    # From here on each rank has its own streams, for dropout, and buffers.
    parallel.ranks.start(parallel.module, parallel.devices(), Purpose.TRAINING, config.seed)
    return optimizer, ema, gradient_hook


def _make_optimizer(
    config: Config, model: nn.Module, sizes: Sizes, device: torch.device
) -> tuple[torch.optim.Optimizer, OnGradients | None]:
    """Build the optimizer of ``model`` and the user's function on gradients. Raises ConfigError, also if the schedule
    does not fit the optimizer."""
    groups = trained_parameters.groups(config.optimizer, model, sizes.lr)
    optimizer = optimizer_builder.build(config.optimizer, groups, sizes.lr)
    sizes.schedule.require_momentum(optimizer)
    return optimizer, on_gradients.build(config, model, optimizer, device)


def open_loaders(
    config: Config, task: OpenedTask, parallel: ParallelStrategy, sizes: Sizes, stop: Stop, cleanup: ExitStack
) -> tuple[TrainData, EvalData]:
    """Return the batches of this process; ``cleanup`` closes their loaders after an error."""
    ranks, runtime = parallel.ranks, parallel.ranks.runtime
    options = config.data.num_workers, runtime.device, config.runtime.timeout_s, stop.ends_wait, runtime.limited
    loaders = [Loader(laid_out(rows, config), *options) for rows in (task.train, task.eval)]
    for each in loaders:
        cleanup.callback(each.close)
    train_data = TrainData(
        loaders[0],
        rule=config.data.shard,
        ranks=ranks.own,
        num_ranks=ranks.num,
        per_rank=sizes.per_rank,
        accumulate=config.batch.accumulate,
        seed=config.seed,
        tail=config.data.tail,
        batch_norm_spans_ranks=bool(parallel.sync_norms),
    )
    return train_data, EvalData(loaders[1], ranks.own, ranks.num, sizes.eval_batch, ranks.most)


def rehearse(config: Config, world_size: int) -> None:
    """Raise the error of checkpoint.resume, a hook, the data, the batch, the model, the optimizer or the schedule with
    which ``config`` could not start on ``world_size`` ranks."""
    borrowed.require_folder(config)
    strategy_class(config.parallel).check_world(config.parallel, world_size)
    hooks.build(config.hooks)
    require_optimizer(config)
    require_model(config, weights=not config.checkpoint.named)
    task = opening.open_on_rank(config)
    sizes = sizes_of(config, len(task.train), config.parallel.num_ranks(world_size))
    _make_optimizer(config, build_model(config, task), sizes, torch.device("cpu"))
    require_mixable(config, task)


def build_model(config: Config, task: OpenedTask) -> nn.Module:
    """Build the model on the CPU in float32. Its initial weights depend only on the seed."""
    rng.seed_all(Purpose.INITIAL_WEIGHTS, config.seed)
    model = task.model(config.model)
    if config.model.lora is not None:
        from harness.training.model import lora  # late: few runs need it

        lora.apply(model, config.model.lora)
    trained_parameters.freeze(model, config.model.freeze)
    return model


def _without_values(config: Config, task: OpenedTask) -> nn.Module:
    """Return ``build_model`` without memory for the values, which come from rank 0; with values if that is
    impossible."""
    try:
        with sharding.without_values():
            return build_model(config, task)
    except Exception as error:  # of the model's own code, which may need values; or it fails on rank 0 as well
        log.info("%14s: built with its values on this rank too: %s", "model", first_line(error))
        return build_model(config, task)


def require_mixable(config: Config, task: OpenedTask) -> None:
    """Raise ConfigError if train.mixup or train.cutmix is set and does not fit the task."""
    if config.train.mixup or config.train.cutmix:
        batch = read(copy.copy(task.train), np.zeros(1, np.int64), 0)  # loader workers must not share a file it opens
        mixing.require(config.train, task.prepare(batch.inputs))
