"""Assemble a run: one function, in the one order that works, with the reasons."""

from __future__ import annotations

import logging
import math
import time
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.config import loader, presets
from harness.config.schema import Config
from harness.data.loader import EvalData, Loader, TrainData
from harness.data.seeds import INITIAL_WEIGHTS, TRAINING
from harness.data.shards import bounds, num_steps
from harness.distributed import devices
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import ConfigError, DataError, first_line, plural
from harness.runs.run_dir import RunFolder
from harness.trackers import metrics_log
from harness.training import checkpointing, determinism, mixing, rng
from harness.training.checkpoint_writer import CheckpointWriter
from harness.training.console import ProgressBar
from harness.training.evaluation.evaluate import laid_out
from harness.training.health import Health
from harness.training.logical_ranks import LogicalRanks, kernels
from harness.training.meter import Meter
from harness.training.models import recompute
from harness.training.optimizer import on_gradients, optim, precision
from harness.training.optimizer.schedule import Schedule
from harness.training.progress import Coverage, State
from harness.training.run import Run
from harness.training.strategies import sharding
from harness.training.strategies.base import check_world, find
from harness.training.task import OpenedTask, SupportsFileCheck, SupportsFileCopies, open_data

log = logging.getLogger("harness")

FILES_S = 2.0  # for a look at the files that the rows name

SKEWED = 0.5  # total variation distance between the labels of a shard and of all rows: of two disjoint halves


def build(config: Config, runtime: Runtime, folder: RunFolder, stop: Stop) -> Run:
    """Build everything the loop needs, restored from the checkpoint to resume from, if there is one. Collective."""
    determinism.require(config.train.deterministic)
    precision.set_tf32(config.precision)
    if config.parallel.logical_ranks is not None:  # a launcher's default depends on the number of processes
        torch.set_num_threads(config.launch.threads)
    num_threads = torch.get_num_threads()
    task = open_task(config, runtime)
    with runtime.together("opening the trackers"):
        tracker = metrics_log.open_log(folder.metrics, runtime.rank, config, loader.to_text(config))
    with runtime.together("dividing the batch"):
        check_world(config.parallel, runtime.world_size)
        ranks = LogicalRanks(runtime, config.parallel.logical_ranks)
        size = sizes(config, len(task.train), ranks.num)
    if ranks.fixed:
        runtime.all_equal(
            kernels(runtime.device),
            "what the last bits of a result depend on",
            "start all ranks on machines of one kind, or remove parallel.logical_ranks",
        )
    if warning := too_few_rows(size, len(task.train)):
        log.warning("%s", warning)
    warn_of_skew(config, task, runtime)
    copy_files(config, task, runtime)
    with runtime.announced("building the model"), runtime.together("building the model"):
        chosen = precision.choose(config.precision, runtime.device, config.needs_our_amp)
        parallel = find(config.parallel)(config.parallel, chosen, runtime.device, runtime.world_size)
        parallel.ranks = ranks
        model = _without_values(config, task) if parallel.sharded and runtime.rank else build_model(config, task)
        determinism.require_restorable(model, runtime.device, config.train.deterministic)
        recompute.apply(model, config.model.activation_checkpointing)
        require_mixable(config, task)
    # Only rank 0 records it. Before the strategy and amp change the model.
    with runtime.limited("reading a row of the dataset"):
        operations = num_operations(model, task) if runtime.rank == 0 else None
    given: dict[str, Any] = {}
    if config.model.weights is not None:
        from harness.training.models import weights  # late: few runs need it

        given = weights.start(model, config, runtime, folder.checkpoints.folder)
    if parallel.sharded:  # ``prepare`` moves it in parts
        runtime.all_equal(sharding.layout(model), "the model", "its layers must not depend on the rank or on chance")
    else:
        with runtime.together("moving the model to its device"):
            model = model.to(runtime.device)
            if config.model.channels_last:
                model = model.to(memory_format=torch.channels_last)  # before amp, which copies weights as they are
        if given:
            sharding.replicate(model)
    # Before the optimizer, which holds the parameters that this makes: it replaces batch norms and shards weights.
    model = parallel.prepare(model)
    with runtime.together("building the optimizer"):
        optimizer = optim.build(config.optimizer, optim.groups(config.optimizer, model, size.lr), size.lr)
        trained = [param for group in optimizer.param_groups for param in group["params"]]
        if config.optimizer.larc is not None:
            optimizer = chosen.larc(optimizer, config.optimizer.larc)
        size.schedule.require_momentum(optimizer)
        own = on_gradients.of_run(config, model, optimizer, runtime.device)
        model, optimizer = chosen.initialize(model, optimizer)
    # After amp, which changes the types of the weights whose gradients are averaged.
    parallel.wrap(model)
    ema = None
    if config.train.ema_decay:
        ema = optim.Ema(trained, list(chosen.master_params(optimizer)), config.train.ema_decay)
    if config.model.compile:
        # After amp, whose casts are to be compiled too.
        parallel.compile(None if config.model.compile is True else config.model.compile)
    devices.keep_freed_memory(runtime.device)
    # From here on each rank has its own streams, for dropout, and buffers.
    ranks.start(parallel.module, parallel.devices(), TRAINING, config.seed)
    waits = (config.data.num_workers, runtime.device, config.runtime.timeout_s, stop.ends_wait, runtime.limited)
    train_loader, eval_loader = (Loader(laid_out(rows, config), *waits) for rows in (task.train, task.eval))
    run = Run(
        config=config,
        runtime=runtime,
        folder=folder,
        task=task,
        train_data=TrainData(
            train_loader, config.data.shard, ranks.own, ranks.num, size.per_rank, config.batch.accumulate,
            config.seed, config.data.tail, bool(parallel.sync_norms),
        ),
        eval_data=EvalData(eval_loader, ranks.own, ranks.num, size.eval_batch, ranks.most),
        parallel=parallel,
        ranks=ranks,
        precision=chosen,
        optimizer=optimizer,
        schedule=size.schedule,
        ema=ema,
        on_gradients=own,
        health=Health(config, runtime, chosen, parallel.module, ema, optimizer, folder.where),
        writer=CheckpointWriter(
            runtime, folder.checkpoints, config.checkpoint.async_save, folder.publish
        ),
        tracker=tracker,
        progress=ProgressBar(runtime.rank),
        stop=stop,
        state=State(),
        meter=Meter(runtime.device, len(ranks.own)),
        coverage=Coverage(len(task.train), config.seed),
        started=time.perf_counter(),
        num_threads=num_threads,
        operations=operations,
        weights=given,
    )  # fmt: skip
    checkpointing.resume(run)
    return run


@dataclass(frozen=True)
class Sizes:
    """Numbers that follow from the configuration, the number of rows and the world size."""

    per_rank: int
    micro_batch: int
    """Rows of the largest forward pass of a rank, fewer than configured if the data has fewer."""
    global_batch: int
    eval_batch: int
    steps_per_epoch: int
    total_steps: int
    lr: float
    schedule: Schedule


def sizes(config: Config, num_rows: int, world_size: int) -> Sizes:
    """Raises ConfigError if ``world_size`` ranks cannot share the global batch or if the warm-up does not fit into the
    run, DataError if there are too few rows."""
    batch = config.batch
    if misfit := batch.misfit(world_size):
        raise ConfigError(misfit[0], where="batch.global", hint=misfit[1])
    per_rank = batch.per_rank if batch.global_ is None else batch.global_ // world_size
    assert per_rank is not None  # harness.config.constraints requires one of the two
    if num_rows < world_size:
        hint = f"start at most {plural(num_rows, 'process')}"
        raise DataError(
            f"only {plural(num_rows, 'training row')} for {plural(world_size, 'rank')}", where="task", hint=hint
        )
    steps = num_steps(num_rows, world_size, per_rank, config.data.tail)
    if steps == 0:
        raise DataError(
            f"{plural(num_rows, 'training row')} cannot fill one global batch of {per_rank * world_size},"
            " and data.tail=drop discards incomplete batches",
            where="batch",
            hint="make the batch smaller, or set data.tail=use",
        )
    total = steps * config.train.epochs
    num_steps_of_run = min(total, config.train.max_steps or total)
    lr = optim.scaled_lr(config.optimizer, per_rank * world_size)
    schedule = Schedule(config.schedule, config.optimizer.lr, lr / config.optimizer.lr, steps, num_steps_of_run)
    schedule.require_fit(total)
    schedule.require_call()
    return Sizes(
        per_rank=per_rank,
        micro_batch=-(-min(per_rank, -(-num_rows // world_size)) // batch.accumulate),
        global_batch=per_rank * world_size,
        eval_batch=batch.eval_per_rank or per_rank // batch.accumulate,
        steps_per_epoch=steps,
        total_steps=num_steps_of_run,
        lr=lr,
        schedule=schedule,
    )


def too_few_rows(size: Sizes, num_rows: int) -> str:
    """A warning if the training rows do not fill one global batch, else empty."""
    if num_rows >= size.global_batch:
        return ""
    return (
        f"the global batch of {size.global_batch} is larger than the training data: each epoch is one step of "
        f"{plural(num_rows, 'row')}; make the batch smaller"
    )


def open_task(config: Config, runtime: Runtime, files_s: float = FILES_S) -> OpenedTask:
    """Open the task's data, look ``files_s`` seconds for missing files, and check that the data is the same on every
    rank. Collective."""
    opened = runtime.patiently("opening the data", lambda: _opened(config, runtime.rank, runtime.world_size, files_s))
    runtime.all_equal(
        opened.fingerprint,
        "the content of the annotations",
        "give every machine the same files; one may have changed while the run started",
    )
    for note in opened.notes:
        log.warning("%s", note)
    return opened


def copy_files(config: Config, task: OpenedTask, runtime: Runtime, train: bool = True) -> None:
    """Copy the files that this rank's rows need and that loader workers would wait for, such as archives behind URLs.
    Collective. ``train``: not only the rows for evaluation."""
    if not isinstance(task, SupportsFileCopies):
        return

    def of_rank(num_rows: int) -> range:
        return range(*bounds(num_rows, runtime.rank, runtime.world_size))

    num_train = len(task.train) if train else 0
    rows = of_rank(num_train) if config.data.shard == "contiguous" else range(num_train)
    work = partial(task.copy_files, rows, of_rank(len(task.eval)), runtime.rank)
    runtime.patiently("copying the files of the data", work, math.inf)  # a download without progress ends by itself


def rehearse(config: Config, world_size: int) -> None:
    """Raise the error of the data or the batch with which ``config`` could not start on ``world_size`` ranks."""
    check_world(config.parallel, world_size)
    sizes(config, len(_opened(config).train), config.parallel.num_ranks(world_size))


def _opened(config: Config, rank: int = 0, world_size: int = 1, files_s: float = FILES_S) -> OpenedTask:
    opened = open_data(config.task, config.seed, Path(config.data.cache_dir) if config.data.cache_dir else None)
    if isinstance(opened, SupportsFileCheck):
        opened.require_files(rank, world_size, files_s)
    return opened


def build_model(config: Config, task: OpenedTask) -> nn.Module:
    """Build the model on the CPU in float32. Its initial weights depend only on the seed."""
    rng.seed_all(INITIAL_WEIGHTS, config.seed)
    model = task.model(config.model)
    optim.freeze(model, config.model.freeze)
    return model


def _without_values(config: Config, task: OpenedTask) -> nn.Module:
    """``build_model`` without memory for the values, which come from rank 0; with values if that is impossible."""
    try:
        with sharding.without_values():
            return build_model(config, task)
    except Exception as error:  # of the model's own code, which may need values; or it fails on rank 0 as well
        log.info("%14s: built with its values on this rank too: %s", "model", first_line(error))
        return build_model(config, task)


class _Operations(TorchDispatchMode):
    """Counts the operations that torch carries out; views cost as much time of the host as others."""

    found = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += 1
        return function(*args, **(kwargs or {}))


def num_operations(model: nn.Module, task: OpenedTask) -> int | None:
    """The operations of torch in a forward pass of ``model``, each of which the host starts; None if they cannot be
    counted.

    A copy of the model runs on the meta device, which needs no memory and changes neither ``model``, with its Python
    attributes, nor a random stream.
    """
    tensors = [*model.parameters(), *model.buffers()]
    states = rng.get_state(torch.device("cpu"))
    try:
        row = task.prepare(task.train.batch(np.zeros(1, np.int64), 0).inputs)
        copied = deepcopy(model, {id(tensor): torch.empty_like(tensor, device="meta") for tensor in tensors})
        with _Operations() as operations, torch.no_grad():
            copied(torch.cat([row, row]).to("meta"))  # two rows: batch norm refuses one
    except Exception:  # of the user's own model or task, of which training reports real faults, or of a meta kernel
        return None
    finally:
        rng.set_state(states, torch.device("cpu"))
    return operations.found


def require_mixable(config: Config, task: OpenedTask) -> None:
    """Raise ConfigError if train.mixup or train.cutmix is set and does not fit the task."""
    if config.train.mixup or config.train.cutmix:
        mixing.require(config.train, task.prepare(task.train.batch(np.zeros(1, np.int64), 0).inputs))


def warn_of_skew(config: Config, task: OpenedTask, runtime: Runtime) -> None:
    """Warn if the labels of a rank's shard differ from all labels, which biases its gradients. Collective."""
    if config.data.shard != "contiguous" or runtime.world_size == 1:
        return
    part = bounds(len(task.train), runtime.rank, runtime.world_size)
    mine = runtime.patiently("counting labels", lambda: task.label_counts(*part))
    shards = [shard for shard in runtime.gather(mine) if shard is not None]
    if len(shards) < runtime.world_size:
        return  # the task has no labels
    counts = np.stack(shards).astype(float)
    whole = counts.sum(0) / max(1.0, counts.sum())
    distance = np.abs(counts / np.maximum(1.0, counts.sum(1, keepdims=True)) - whole).sum(1) / 2
    if distance.max() >= SKEWED:
        log.warning(
            "the labels of rank %d differ strongly from the rest (distance %.2f out of 1): the CSV seems to be "
            "sorted by "
            "label. Use data.shard=global, or shuffle the CSV once.", int(distance.argmax()), distance.max(),
        )  # fmt: skip


def describe(
    config: Config, task: OpenedTask, size: Sizes, world_size: int, device: torch.device, backend: str
) -> dict[str, Any]:
    """Facts about a run, for its log and for ``harness check``."""
    micro_batches = f", in {config.batch.accumulate} micro-batches" if config.batch.accumulate > 1 else ""
    scaling = config.optimizer.lr_scaling
    scaled = "" if scaling == "none" else f" ({scaling} scaling of {config.optimizer.lr:g})"
    return {
        "task": config.task.name,
        **task.summary,
        "ranks": world_size,
        "device": str(device),
        "batch": f"{size.per_rank} per rank, {size.global_batch} in total{micro_batches}",
        "steps per epoch": size.steps_per_epoch,
        "steps": size.total_steps,
        "learning rate": f"{size.lr:g}{scaled}",
        "schedule": size.schedule.described(),
        "amp": precision.described(config.precision, device, backend),
        "preset": presets.nearest(config),
        "deterministic": determinism.described(config.train.deterministic),
        "shards": config.data.shard,
    }
