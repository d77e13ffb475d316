"""Finds the checkpoint to resume from, and restores a run from it.

``restore`` and what it calls must contain no collective, since ``resume`` calls it in ``patiently``.
"""

from __future__ import annotations

import inspect
import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from harness.data.seeds import Purpose
from harness.distributed.runtime import Runtime
from harness.errors import CheckpointError, first_line
from harness.runs import checkpoint, layout
from harness.runs.files import replacing
from harness.training.checkpoints import checkpointing
from harness.training.checkpoints.checkpointing import Content
from harness.training.optimizer.registry import class_name
from harness.training.reproducibility.determinism import kernels
from harness.training.run import Run
from harness.training.state import State, is_over
from harness.training.strategies import sharding
from harness.training.task import SupportsPredictions

log = logging.getLogger("harness")

_WITH_STATE = ("amsgrad", "centered")  # settings of torch's optimizers that keep another average from the first step


class LogBefore(NamedTuple):
    """The part of metrics.jsonl that was written before the restored checkpoint."""

    num_bytes: int = 0
    sha256: str = ""


def resume(run: Run) -> None:
    """Restore the newest checkpoint of this run, or else the one that checkpoint.resume names; else start at zero.
    Collective."""
    path, is_own = checkpoint_to_resume(run)
    if path is not None:
        verify(run.runtime, path, is_own)

    def work() -> LogBefore:
        if path is None:
            return LogBefore()
        before = restore(run, path, is_own)
        if is_own and run.runtime.rank == 0 and run.checkpoints.named(layout.LATEST) == path.name:
            run.checkpoints.sweep()  # a kill may have come after the checkpoint, before the removal of older ones
        return before

    log_before = run.runtime.patiently("restoring", work)
    if is_own:
        _use_results(run, log_before)

    def rewind() -> None:
        if run.this_start.done_at == run.state.step:
            run.tracker.rewind(run.tracker.offset())
        elif is_own:  # later lines of metrics.jsonl will be written again
            run.tracker.rewind(log_before.num_bytes, log_before.sha256, run.state.history)
        else:
            run.tracker.rewind(0)

    run.runtime.patiently("opening the log", rewind)
    if path is not None and is_own:
        run.writer.complete = run.state.step
    if path is not None and not is_own:
        run.state.forget_evaluations()  # the best weights are in the folder of the other run
        run.saved_step = -1


def _use_results(run: Run, log_before: LogBefore) -> None:
    """Use the results of an earlier start that ended at the checkpoint: its last evaluation, which comes after the
    checkpoint, is only in its summary. If the run is still over, ``this_start.done_at`` is set; if it is to train
    longer, best weights of an evaluation that it does not repeat are kept in another file. Collective."""
    runtime = run.runtime

    def work() -> dict[str, Any]:
        if runtime.rank or not run.tracker.goes_on(*log_before):
            return {}
        return run.folder.results(run.state.step, isinstance(run.task, SupportsPredictions))

    summary = runtime.from_first(runtime.patiently("looking for results", work))
    if not summary or summary["best"].get(run.config.best_metric) is None:
        return
    finished = _finished_state(run, summary)
    if is_over(run.config, finished):
        run.state, run.this_start.done_at = finished, finished.step
    elif finished.best_step == finished.step and not run.evaluation_due():
        target = run.folder.path / layout.FORMER_WEIGHTS
        runtime.patiently("keeping the best weights", lambda: _copy_file(runtime, run.folder.weights, target))
        text = "%s %.4f, the best so far, was that of the former end, step %d, which a longer run does not evaluate: "
        text += "its weights are kept as %s"
        log.warning(text, run.config.best_metric, finished.best, finished.best_step, target)


def _finished_state(run: Run, summary: dict[str, Any]) -> State:
    """Return the state of ``run`` after the evaluations in ``summary``."""
    best, history = summary["best"], summary["history"]
    after = {"evaluated": run.state.step, "best": best[run.config.best_metric], "best_step": best["step"]}
    return replace(run.state, history=history, **after)


def _copy_file(runtime: Runtime, source: Path, target: Path) -> None:
    if runtime.rank == 0:
        with replacing(target) as temporary:
            shutil.copyfile(source, temporary)


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
    from harness.runs import borrowed  # late: it imports fsspec, which few runs need

    return runtime.patiently("fetching the checkpoint to resume from", lambda: borrowed.borrow(run.config)), False


def verify(runtime: Runtime, path: Path, is_own: bool = True) -> None:
    """Raise CheckpointError unless every rank has the checkpoint ``path``, which rank 0 has verified. Ranks without a
    shared disk have copies, and the first rank of each copy verifies it; of another run, each rank has. Collective."""
    copies = runtime.gather(runtime.patiently("looking for the checkpoint", lambda: _copy(path)))
    rank, copy = runtime.rank, copies[runtime.rank]
    hint = "copy rank 0's run folder to this machine, or set output to a shared disk or a URL"
    hint = hint if is_own else "give every machine the same checkpoint.resume"

    def work() -> None:
        if copy[0] != copies[0][0]:
            message = f"rank {rank} cannot find the checkpoint that rank 0 resumes from"
            raise CheckpointError(message, where=str(path), hint=hint)
        if is_own and copies.index(copy) == rank > 0 and (problem := checkpoint.damage(path)):
            raise CheckpointError(f"the copy of rank {rank}: {problem}", where=str(path), hint=hint)

    runtime.patiently("verifying the checkpoint", work)


def _copy(path: Path) -> tuple[str, int, int]:
    """Return the digest of a checkpoint, and what no other copy of it has."""
    digest = checkpoint.digest(path)
    status = (path / layout.MANIFEST).stat() if digest else None
    return (digest, status.st_ino, status.st_ctime_ns) if status else ("", 0, 0)


def restore(run: Run, path: Path, is_own: bool = True) -> LogBefore:
    """Restore ``run`` from the checkpoint at ``path``; return the log that it belongs to.
    One of another run (``is_own`` false) brings no settings.

    On the same number of ranks, it continues bit for bit like an uninterrupted run. On another, the position in the
    data, the weights and the optimizer are exact, and no row of the epoch is lost or repeated; random streams (dropout)
    start from new seeds, and batch norm statistics are the mean over the former ranks.

    A new moving average starts from the masters, so it follows the optimizer. Random streams come last: what is
    restored before may draw from them.
    """
    own_shards = sharding.own_shards(run.module, run.optimizer, run.ema.average if run.ema else ())
    mapped = run.parallel.holds_shard  # each rank then reads only its shard
    content = cast(Content, run.checkpoints.read(path, mapped, own_shards))
    _check_fit(run, content, path)
    try:
        state = State.from_dict(content["state"])
        run.module.load_state_dict(sharding.model_parts(run.module, content["model"]))
        optimizer = sharding.optimizer_parts(run.optimizer, content["optimizer"])
        run.optimizer.load_state_dict(optimizer if is_own else _with_settings_of(run.optimizer, optimizer))
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
    if state.segments and not run.train_data.steps_left(state.segments, state.segments[-1]):
        state.next_epoch()  # a loop of the user's own has saved the last step before it called this
    run.lr = run.schedule.lr(state.applied, state.plateau.reductions)  # for a line before a step of this start
    _restore_ranks(run, content)
    run.saved_step = state.step
    run.this_start.zero_s = time.perf_counter() - run.state.wall_s
    log.info("resumed from %s: epoch %d, step %d", path, run.state.epoch + 1, run.state.step)
    return LogBefore(content["log_offset"], content["log_sha256"])


def _with_settings_of(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict ``state`` of another run, with the settings that ``optimizer`` was built with.

    A group holds both: settings are what the constructor takes and what ``trained_parameters.groups`` adds. The rest is
    state, such as the count of steps of Apex's optimizers. ``Optimizer.load_state_dict`` would take all of it from
    ``state``. Raises ValueError if a setting needs state that the other run did not have.
    """
    saved, built = state["param_groups"], optimizer.param_groups
    if len(saved) != len(built):
        return state  # which load_state_dict refuses
    classes = type(getattr(optimizer, "optim", optimizer)).__mro__
    made = [vars(one)["__init__"] for one in classes if "__init__" in vars(one)]
    names = {name for one in made for name in inspect.signature(one).parameters}
    names = {*names, "match", "lr_scale"} - {"params", "step"}  # FusedMixedPrecisionLamb takes its first step
    merged = []
    for old, new in zip(saved, built, strict=True):
        for name in (*_WITH_STATE, *(["momentum"] if "alpha" in new else [])):  # RMSprop makes its buffers at first
            if new.get(name) and not old.get(name):
                raise ValueError(f"the optimizer's {name} needs averages that were not kept without it")
        kept = {key: value for key, value in old.items() if key not in names}
        merged.append({**kept, **{key: value for key, value in new.items() if key in names}})
    return {**state, "param_groups": merged}


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
    changed = [f"{key}={value}" for key, value in content["order"].items() if value != checkpointing.order(run)[key]]
    if changed and content["state"]["segments"]:
        settings = " ".join(changed)
        raise CheckpointError(
            f"it was written within an epoch, whose rows are in the order of {settings}; this run would use some of "
            "them twice and others not at all",
            where=str(path),
            hint=f"use {settings}, or resume from a checkpoint at the end of an epoch",
        )
    _check_kernels(run, content, path)
    if content["data"] != run.task.fingerprint:
        raise CheckpointError(
            "the annotations have changed since it was written, so its position in the data is meaningless",
            where=str(path),
            hint="restore the old files, or start a new run with checkpoint.resume=never",
        )


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


def _restore_ranks(run: Run, content: Content) -> None:
    """Restore the state that differs between ranks, and the rows that the epoch has used."""
    saved, ranks = content["ranks"], run.ranks
    if run.runtime.rank == 0:
        run.coverage.load(content["seen"])
    if content["num_ranks"] == ranks.num:
        ranks.load_state(saved)
        run.meter.load_state([saved[rank]["meter"] for rank in ranks.own])
        return
    log.info("number of ranks: %d in the checkpoint, %d now; random streams get new seeds", len(saved), ranks.num)
    ranks.start(run.module, run.parallel.devices(), Purpose.TRAINING, run.config.seed, run.state.step)
    if all(rank_state["buffers"] for rank_state in saved):
        buffer_names = (set(rank_state["buffers"]) for rank_state in saved)
        names = set.intersection(*buffer_names)  # a model may have deleted others
        several = {name: torch.stack([rank_state["buffers"][name] for rank_state in saved]) for name in names}
        ranks.set_buffers({name: b.double().mean(0) for name, b in several.items() if b.is_floating_point()})
    # Sums do not depend on which rank holds them: rank 0 gets those of all. ``steps`` is the same on each, not a sum.
    meters = [rank_state["meter"] for rank_state in saved]
    nothing = {key: type(value)() for key, value in meters[0].items()}
    total = {key: sum((meter[key] for meter in meters), start=nothing[key]) for key in meters[0]}
    steps = {"steps": meters[0]["steps"]}
    run.meter.load_state([(total if rank == 0 else nothing) | steps for rank in ranks.own])
