"""Save a run to a checkpoint, and restore it. ``restore`` and what it calls must contain no collective, since
``resume`` calls it in ``patiently``.

The files of a checkpoint are ``harness.runs.checkpoint``'s.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn

from harness.data.seeds import TRAINING
from harness.errors import CheckpointError, first_line
from harness.runs import checkpoint, layout
from harness.runs.console import working
from harness.runs.weights_file import on_host
from harness.training import hooks
from harness.training.determinism import kernels
from harness.training.optimizer.optim import Ema, class_name, with_settings_of
from harness.training.progress import State
from harness.training.run import Run, is_over
from harness.training.strategies import sharding
from harness.training.task import SupportsPredictions

log = logging.getLogger("harness")


class OfRank(TypedDict):
    """What each rank has of its own."""

    rng: dict[str, Any]
    """Its random streams, from ``rng.Streams.plain``."""
    buffers: dict[str, Tensor]
    """On the CPU; empty if there is one rank, whose buffers are in the model."""
    meter: dict[str, Any]
    """From ``Meter.state``."""


class BesideTheModel(TypedDict):
    """The parts of a checkpoint that are no tensors of the model's and, apart from hooks, the same on all ranks."""

    state: dict[str, Any]
    amp: dict[str, Any]
    schedule: dict[str, Any]
    hooks: list[dict[str, Any]]


class Content(BesideTheModel):
    """The content of a checkpoint. Of several files in the format ``sharded``, each rank has its shards."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    optimizer_class: str
    backend: str
    """Whose amp it was: ``Precision.backend``."""
    opt_level: str
    ema: dict[str, Any] | None
    ranks: list[OfRank]
    seen: Tensor
    """The rows that the epoch has used, from ``Coverage.reduced``."""
    log_offset: int
    """Bytes of metrics.jsonl before it."""
    log_sha256: str
    world_size: int
    kernels: dict[str, Any]
    """With logical ranks, on what the bits of a result depend besides the recipe."""
    data: str
    """The fingerprint of the task's data."""
    order: dict[str, Any]
    """The settings on which the order of the rows in an epoch depends."""


def save(run: Run) -> None:
    """Write a checkpoint of the current step, unless there is one. Collective; an error on rank 0 is raised on all
    ranks."""
    if run.saved_step == run.state.step:
        return
    start = time.perf_counter()
    run.hooks.call(hooks.BEFORE_CHECKPOINT, run)
    with working("writing a checkpoint"):
        _save(run)
    if run.state.in_epoch:  # otherwise it is not part of the training time
        run.meter.costs.add({"checkpoint": time.perf_counter() - start})


def _save(run: Run) -> None:
    state, runtime = run.state, run.runtime
    run.collect_waits()
    # A model that diverged must not become the newest checkpoint.
    losses = run.ranks.sum([loss.detach().clone().reshape(1) for loss in run.meter.losses])
    run.health.loss(losses.item(), run.meter.steps, state, run.writer.complete)
    run.health.weights(state, run.writer.complete)
    state.wall_s = run.wall_s()
    ranks = [of_rank for of_process in runtime.gather_to_first(_of_this_process(run)) for of_rank in of_process]
    seen = run.coverage.reduced(runtime)
    run.writer.wait()  # before the model is gathered, which may need the memory
    shards = run.writer.writes_shards

    def of(part: nn.Module | torch.optim.Optimizer | Ema) -> dict[str, Any]:
        return part.state_dict() if shards else _whole(run, part)

    weights, optimizer, ema = of(run.module), of(run.optimizer), of(run.ema) if run.ema else None
    log_offset, log_digest = runtime.patiently("syncing the log", lambda: (run.tracker.offset(), run.tracker.digest()))
    content: Content = {
        **beside_the_model(run),
        "model": weights,
        "optimizer": optimizer,
        "optimizer_class": class_name(run.optimizer),
        "backend": run.precision.backend,
        "opt_level": run.config.precision.opt_level,
        "ema": ema,
        "ranks": ranks,
        "seen": seen,
        "log_offset": log_offset,
        "log_sha256": log_digest,
        "world_size": run.ranks.num,
        "kernels": kernels(runtime.device) if run.ranks.fixed else {},
        "data": run.task.fingerprint,
        "order": _order(run),
    }
    run.writer.write(state.step, {**content} if shards or runtime.rank == 0 else None)
    run.saved_step = state.step


def beside_the_model(run: Run) -> BesideTheModel:
    """Return what ``harness verify-resume`` compares at each step."""
    return {
        "state": run.state.to_dict(),
        "amp": run.precision.state_dict(),
        "schedule": run.schedule.state_dict(),
        "hooks": run.hooks.state_dict(),
    }


def keep_best(run: Run) -> None:
    """Mark the checkpoint of the current step as the best, and write its weights as safetensors. Collective."""
    run.writer.wait()  # the best checkpoint must exist
    with run.averaged():
        weights = _whole(run, run.module)
        with run.runtime.together("copying the best weights"):
            tensors = on_host(weights) if run.runtime.rank == 0 else {}

    def write() -> None:
        if run.runtime.rank == 0:
            run.checkpoints.mark_best(run.state.step, tensors, run.folder.weights)

    run.runtime.patiently("keeping the best weights", write)


def resume(run: Run) -> None:
    """Restore the newest checkpoint of this run, or else the one that checkpoint.resume names; else start at zero.
    Collective."""
    path, is_own = checkpoint_to_resume(run)
    first = run.runtime.from_first(path and checkpoint.digest(path))

    def work() -> None:
        if path is not None:
            if checkpoint.digest(path) != first:
                raise CheckpointError(
                    f"rank {run.runtime.rank} cannot find the checkpoint that rank 0 resumes from",
                    where=str(path),
                    hint="copy rank 0's run folder to this machine, or set output to a shared disk or a URL",
                )
            restore(run, path, is_own)
            if is_own and run.runtime.rank == 0 and run.checkpoints.named(layout.LATEST) == path.name:
                run.checkpoints.sweep()  # a kill may have come after the checkpoint, before the removal of older ones

    def rewind() -> None:
        if run.done_at == run.state.step:
            run.tracker.rewind(run.tracker.offset())
        elif is_own:  # later lines of metrics.jsonl will be written again
            run.tracker.rewind(run.log_offset, run.log_digest, run.state.history)
        else:
            run.tracker.rewind(0)

    run.runtime.patiently("restoring", work)
    if is_own:
        _keep_results(run)
    run.runtime.patiently("opening the log", rewind)
    if path is not None and is_own:
        run.writer.complete = run.state.step
    if path is not None and not is_own:
        run.state.forget_evaluations()  # the best weights are in the folder of the other run
        run.saved_step = -1
        save(run)  # so that this run no longer needs the other one
        run.writer.wait()


def _keep_results(run: Run) -> None:
    """Set ``run.done_at`` if an earlier start has finished the run: its last evaluation, which comes after the
    checkpoint, then is in its summary. Collective."""
    before, runtime = run.state, run.runtime

    def work() -> dict[str, Any]:
        if runtime.rank or not run.tracker.goes_on(run.log_offset, run.log_digest):
            return {}
        return run.folder.results(before.step, isinstance(run.task, SupportsPredictions))

    summary = runtime.from_first(runtime.patiently("looking for results", work))
    if not summary or (best := summary["best"].get(run.config.best_metric)) is None:
        return
    step, history = summary["best"]["step"], summary["history"]
    later = sum(entry["step"] > step for entry in history)
    last = replace(before, evaluated=before.step, history=history, best=best, best_step=step, since_best=later)
    if is_over(run.config, last):  # otherwise it is to train longer
        run.state, run.done_at = last, before.step


def checkpoint_to_resume(run: Run) -> tuple[Path | None, bool]:
    """Return (the checkpoint to restore, whether it is this run's own). Collective."""
    runtime, section = run.runtime, run.config.checkpoint
    looks = runtime.rank == 0 and section.resume != "never"  # newest() reads and verifies all files
    newest = runtime.patiently("looking for a checkpoint", lambda: run.checkpoints.newest() if looks else None)
    newest = runtime.from_first(newest)
    if newest is not None:  # only its name is the same everywhere: ranks without a shared disk have their own copy
        return run.checkpoints.folder / newest.name, True
    if section.named is None:
        return None, False
    from harness.runs import remote  # late: it imports fsspec, which few runs need

    return runtime.patiently("fetching the checkpoint to resume from", lambda: remote.borrow(run.config)), False


def restore(run: Run, path: Path, is_own: bool = True) -> None:
    """Restore ``run`` from the checkpoint at ``path``. One of another run (``is_own`` false) brings no settings.

    At the same world size, it continues bit for bit like an uninterrupted run. At another world size, the position in
    the data, the weights and the optimizer are exact, and no row of the epoch is lost or repeated; random streams
    (dropout) start from new seeds, and batch norm statistics are the mean over the former ranks.

    A new moving average starts from the masters, so it follows the optimizer. Random streams come last: what is
    restored before may draw from them.
    """
    own = sharding.own_shards(run.module, run.optimizer, run.ema.average if run.ema else ())
    mapped = run.parallel.sharded  # each rank then reads only its shard
    content = cast(Content, run.checkpoints.read(path, mapped, own))
    _check_fit(run, content, path)
    try:
        state = State.from_dict(content["state"])
        run.module.load_state_dict(sharding.model_parts(run.module, content["model"]))
        optimizer = sharding.optimizer_parts(run.optimizer, content["optimizer"])
        run.optimizer.load_state_dict(optimizer if is_own else with_settings_of(run.optimizer, optimizer))
    except (RuntimeError, ValueError, KeyError, TypeError) as error:  # the last of another version's state
        raise CheckpointError(
            f"it does not fit this model: {first_line(error)}",
            where=str(path),
            hint="use the model, the optimizer and the version of the harness it was written with",
        ) from None
    run.precision.load_state_dict(content["amp"])
    if run.ema and content["ema"]:
        run.ema.load_state_dict(content["ema"])
    elif run.ema:  # the other run had none: that of the initial weights, which it was built with, is wrong
        run.ema.start(run.precision.master_params(run.optimizer))
    run.schedule.load_state_dict(content["schedule"])
    run.hooks.load_state_dict(content["hooks"])
    run.state = state
    _restore_ranks(run, content)
    run.saved_step, run.log_offset, run.log_digest = state.step, content["log_offset"], content["log_sha256"]
    run.started = time.perf_counter() - run.state.wall_s
    log.info("resumed from %s: epoch %d, step %d", path, run.state.epoch + 1, run.state.step)


def _check_fit(run: Run, content: Content, path: Path) -> None:
    """Raise CheckpointError if the checkpoint has another opt level, optimizer, data or order of the rows."""
    level = run.config.precision.opt_level
    if content["opt_level"] != level:
        raise CheckpointError(
            f"it was written with opt_level={content['opt_level']}, but this run uses {level}",
            where=str(path),
            hint=f"use precision.opt_level={content['opt_level']}, or start a new run with checkpoint.resume=never",
        )
    before, now = content["optimizer_class"], class_name(run.optimizer)
    if before != now:
        raise CheckpointError(
            f"it holds the state of the optimizer {before}, but this run uses {now}",
            where=str(path),
            hint="use the optimizer it was written with, or start from the other run's weights alone: "
            "model.weights=RUN_FOLDER checkpoint.resume=never",
        )
    changed = [f"{key}={value}" for key, value in content["order"].items() if value != _order(run)[key]]
    if changed and content["state"]["segments"]:
        kept = " ".join(changed)
        raise CheckpointError(
            f"it was written within an epoch, whose rows are in the order of {kept}; this run would use some of them "
            "twice and others not at all",
            where=str(path),
            hint=f"use {kept}, or resume from a checkpoint at the end of an epoch",
        )
    _check_kernels(run, content, path)
    if content["data"] != run.task.fingerprint:
        raise CheckpointError(
            "the annotations have changed since it was written, so its position in the data is meaningless",
            where=str(path),
            hint="restore the old files, or start a new run with checkpoint.resume=never",
        )


def _order(run: Run) -> dict[str, Any]:
    """Return the settings on which the order of the rows in an epoch depends."""
    return {"seed": run.config.seed, "data.shard": run.config.data.shard}


def _check_kernels(run: Run, content: Content, path: Path) -> None:
    """Raise CheckpointError if results of logical ranks would have other bits here."""
    now = kernels(run.runtime.device) if run.ranks.fixed else {}
    before = content["kernels"] if run.ranks.fixed else {}
    if changed := [
        f"{key}: {now.get(key)} now, {value} then" for key, value in before.items() if now.get(key) != value
    ]:
        raise CheckpointError(
            "the bits of a result depend on what has changed since it was written, and parallel.logical_ranks promises "
            f"the same: {'; '.join(changed)}",
            where=str(path),
            hint="continue on such a machine; or start a new run with name=NAME, parallel.logical_ranks=null and "
            f"checkpoint.resume={path}",
        )


def _whole(run: Run, part: nn.Module | torch.optim.Optimizer | Ema) -> dict[str, Any]:
    """Return the state dict of ``part`` on rank 0, with sharded tensors gathered; incomplete on other ranks.
    Collective."""
    first = run.runtime.rank == 0
    if not run.parallel.sharded:
        return part.state_dict() if first else {}
    whole: dict[str, Any] = sharding.whole(part.state_dict(), keep=first)
    return whole


def _of_this_process(run: Run) -> list[OfRank]:
    """Return the state that differs between ranks, of each rank of this process."""
    return [
        {
            "rng": state["rng"],
            "buffers": {name: buffer.cpu() for name, buffer in state["buffers"].items()},
            "meter": meter,
        }
        for state, meter in zip(run.ranks.state(), run.meter.state(), strict=True)
    ]


def _restore_ranks(run: Run, content: Content) -> None:
    """Restore the state that differs between ranks, and the rows that the epoch has used."""
    saved, ranks = content["ranks"], run.ranks
    if run.runtime.rank == 0:
        run.coverage.load(content["seen"])
    if content["world_size"] == ranks.num:
        ranks.load_state(saved)
        run.meter.load_state([saved[rank]["meter"] for rank in ranks.own])
        return
    log.info("number of ranks: %d in the checkpoint, %d now; random streams get new seeds", len(saved), ranks.num)
    ranks.start(run.module, run.parallel.devices(), TRAINING, run.config.seed, run.state.step)
    if saved[0]["buffers"]:
        several = {name: torch.stack([of_rank["buffers"][name] for of_rank in saved]) for name in saved[0]["buffers"]}
        ranks.set_buffers({name: b.double().mean(0) for name, b in several.items() if b.is_floating_point()})
    # Sums do not depend on which rank holds them: rank 0 gets those of all. ``steps`` is the same on each, not a sum.
    meters = [of_rank["meter"] for of_rank in saved]
    nothing = {key: type(value)() for key, value in meters[0].items()} | {"steps": meters[0]["steps"]}
    whole = {key: sum((meter[key] for meter in meters), start=nothing[key]) for key in meters[0]}
    whole["steps"] = meters[0]["steps"]
    run.meter.load_state([whole if rank == 0 else nothing for rank in ranks.own])
