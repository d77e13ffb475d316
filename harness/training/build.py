"""The recipe: one function that builds a run, each line in the one right order, with its reason."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from harness.config import loader
from harness.config.schema import Config
from harness.data.loader import EvalData, Loader, TrainData
from harness.data.seeds import INITIAL_WEIGHTS, TRAINING
from harness.data.shards import bounds, num_steps
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import ConfigError, DataError
from harness.runs import remote
from harness.runs.run_dir import RunFolder
from harness.trackers import metrics_log
from harness.training import optim, precision, rng, strategy
from harness.training.console import Progress
from harness.training.progress import Coverage, Meter, State
from harness.training.run import Run
from harness.training.task import OpenedTask, require_members

log = logging.getLogger("harness")

SKEWED = 0.5  # total variation between a shard's labels and the whole; 0 is the same mixture, 1 nothing in common


@dataclass(frozen=True)
class Sizes:
    """What follows from configuration, rows and world size, before anything is built."""

    per_rank: int
    global_batch: int
    eval_batch: int
    steps_per_epoch: int
    total_steps: int
    lr: float


def sizes(config: Config, num_rows: int, world_size: int) -> Sizes:
    """Raises ConfigError where the batch cannot be dealt to ``world_size`` ranks, DataError for too few rows."""
    batch = config.batch
    if misfit := batch.misfit(world_size):
        raise ConfigError(misfit[0], where="batch.global", hint=misfit[1])
    if batch.global_ is not None:
        per_rank = batch.global_ // world_size
    else:
        assert batch.per_rank is not None  # conflicts() saw to it
        per_rank = batch.per_rank
    if num_rows < world_size:
        raise DataError(
            f"{num_rows} training rows for {world_size} ranks", where="task", hint=f"start at most {num_rows} processes"
        )
    steps = num_steps(num_rows, world_size, per_rank, config.data.tail)
    if steps == 0:
        raise DataError(
            f"{num_rows} training rows do not fill one global batch of {per_rank * world_size}, and data.tail=drop",
            where="batch",
            hint="make the batch smaller, or set data.tail=use",
        )
    total = steps * config.train.epochs
    return Sizes(
        per_rank=per_rank,
        global_batch=per_rank * world_size,
        eval_batch=batch.eval_per_rank or per_rank // batch.accumulate,
        steps_per_epoch=steps,
        total_steps=min(total, config.train.max_steps or total),
        lr=optim.scaled_lr(config.optimizer, per_rank * world_size),
    )


def open_task(config: Config, runtime: Runtime) -> OpenedTask:
    """The task with its data opened, the same on every rank. Collective."""
    with runtime.together("opening the data"):
        opened = _opened(config)
    runtime.all_equal(
        opened.fingerprint,
        "the annotations",
        "give every node the same files; one may have changed while the run started",
    )
    for note in opened.notes:
        log.warning("%s", note)
    return opened


def rehearse(config: Config, world_size: int) -> None:
    """Raise what would keep ``config`` from beginning on ``world_size`` ranks: its data, and how they are dealt."""
    strategy.check_world(config.parallel, world_size)
    sizes(config, len(_opened(config).train), world_size)


def _opened(config: Config) -> OpenedTask:
    opened = config.task.open(config.seed, Path(config.data.cache_dir) if config.data.cache_dir else None)
    require_members(opened, config.task.name)
    return opened


def build_model(config: Config, task: OpenedTask) -> nn.Module:
    """The model on the CPU in float32; its first weights depend on the seed alone, not on rank or world size."""
    rng.seed_all(INITIAL_WEIGHTS, config.seed)
    return task.model(config.model)


def build(config: Config, runtime: Runtime, folder: RunFolder, stop: Stop) -> Run:
    """Everything the loop needs, restored from the newest checkpoint where there is one. Collective."""
    rng.make_deterministic(config.train.deterministic)
    task = open_task(config, runtime)
    with runtime.together("opening the trackers"):
        tracker = metrics_log.open_log(folder.metrics, runtime.rank, config, loader.to_text(config))
    with runtime.together("dealing the rows"):
        strategy.check_world(config.parallel, runtime.world_size)
        size = sizes(config, len(task.train), runtime.world_size)
    warn_of_skew(config, task, runtime)
    with runtime.together("building the model"):
        chosen = precision.choose(config.precision, runtime.device, config.needs_our_amp)
        model = build_model(config, task).to(runtime.device)
        if config.model.channels_last:
            model = model.to(memory_format=torch.channels_last)  # before amp, which copies weights as they are
    # Batch norms are replaced and weights sharded now: the optimizer holds what comes out of that.
    model = strategy.prepare(model, config.parallel, chosen, runtime.device, runtime.world_size)
    with runtime.together("building the optimizer"):
        optimizer = optim.build(config.optimizer, precision.trainable(model.parameters()), size.lr)
        if config.optimizer.larc is not None:
            optimizer = chosen.larc(optimizer, config.optimizer.larc)
        model, optimizer = chosen.initialize(model, optimizer)  # before wrapping: amp changes the weights' types
    replicas = strategy.wrap(  # after amp: reduces what amp made
        model, config.parallel, chosen, runtime.device, runtime.world_size
    )
    ema = (
        optim.Ema(model, list(chosen.master_params(optimizer)), config.train.ema_decay)
        if config.train.ema_decay
        else None
    )
    if config.model.compile:
        model.compile()  # after amp, whose casts are part of what is compiled; parameters and names stay as they are
    # From here on each rank draws its own numbers, for dropout.
    rng.seed_all(TRAINING, config.seed, runtime.rank)
    train = Loader(task.train, config.data.num_workers, runtime.device)
    eval_ = Loader(task.eval, config.data.num_workers, runtime.device)
    floor = config.schedule.min_lr * size.lr / config.optimizer.lr  # min_lr is scaled as lr is
    run = Run(
        config=config,
        runtime=runtime,
        folder=folder,
        task=task,
        train_data=TrainData(
            train, config.data.shard, runtime.rank, runtime.world_size, size.per_rank, config.batch.accumulate,
            config.seed, config.data.tail, bool(replicas.synchronized),
        ),
        eval_data=EvalData(eval_, runtime.rank, runtime.world_size, size.eval_batch),
        parallel=replicas,
        precision=chosen,
        optimizer=optimizer,
        schedule=optim.Schedule(
            config.schedule, size.lr, floor, size.steps_per_epoch, size.total_steps
        ),
        ema=ema,
        checkpoints=folder.checkpoints,
        tracker=tracker,
        progress=Progress(runtime.rank),
        stop=stop,
        state=State(),
        meter=Meter(runtime.device),
        coverage=Coverage(len(task.train)),
        started=time.perf_counter(),
    )  # fmt: skip
    restore(run)
    return run


def restore(run: Run) -> None:
    """Go on from where the configuration says: this run's newest whole checkpoint, else the one that checkpoint.resume
    names; a new run starts its record anew. Collective."""
    runtime, wanted = run.runtime, run.config.checkpoint.resume
    with runtime.together("looking for a checkpoint"):
        newest = run.checkpoints.newest() if runtime.rank == 0 and wanted != "never" else None
    newest = runtime.from_first(newest)
    path: Path | None = None
    if newest is not None:  # ranks without a disk in common have it at places of their own
        path = run.checkpoints.folder / newest.name
    elif wanted not in ("auto", "never"):
        path = runtime.patiently("fetching the checkpoint to resume from", lambda: remote.borrow(run.config))
    with runtime.together("restoring"):
        if path is not None:
            run.restore(path)
        # A checkpoint of this run knows how much of the record was written before it; all after that comes again.
        run.tracker.rewind(run.log_offset if newest else 0)
    if path is not None and newest is None:
        run.state.forget_best()  # those weights are in the other run's folder
        run.saved_step = -1
        run.save()  # from here on the run stands on its own


def warn_of_skew(config: Config, task: OpenedTask, runtime: Runtime) -> None:
    """Say so where a rank's own rows have other labels than the whole: such ranks pull in different directions."""
    if config.data.shard != "contiguous" or runtime.world_size == 1:
        return
    with runtime.together("counting labels"):
        mine = task.label_counts(*bounds(len(task.train), runtime.rank, runtime.world_size))
    if mine is None:
        return  # a task without labels, on every rank
    counts = np.stack(runtime.gather(mine)).astype(float)
    whole = counts.sum(0) / counts.sum()
    distance = np.abs(counts / counts.sum(1, keepdims=True) - whole).sum(1) / 2
    if distance.max() > SKEWED:
        log.warning(
            "rank %d has very different labels from the rest (distance %.2f of 1): the CSV seems sorted by label. "
            "Use data.shard=global, or shuffle the CSV once.", int(distance.argmax()), distance.max(),
        )  # fmt: skip


def describe(
    config: Config, task: OpenedTask, size: Sizes, world_size: int, device: torch.device, backend: str
) -> dict[str, Any]:
    """What would happen, or is about to: one line a fact."""
    batch = f"{size.per_rank} a rank, {size.global_batch} in all"
    scaling = (
        ""
        if config.optimizer.lr_scaling == "none"
        else f" ({config.optimizer.lr_scaling} scaling of {config.optimizer.lr:g})"
    )
    return {
        "task": config.task.name,
        **task.summary,
        "ranks": world_size,
        "device": str(device),
        "batch": batch + (f", in {config.batch.accumulate} micro-batches" if config.batch.accumulate > 1 else ""),
        "steps": f"{size.steps_per_epoch} an epoch, {size.total_steps} in all",
        "learning rate": f"{size.lr:g}{scaling}",
        "amp": f"{config.precision.opt_level} by {backend}",
        "shards": config.data.shard,
    }
