"""What a checkpoint contains, and how it is saved. ``harness.training.checkpoints.resuming`` restores it.

The life of a checkpoint:

1. ``save`` checks the loss and the weights, and gathers the content on rank 0, but for shards, which each rank writes.
2. ``CheckpointWriter.write`` (checkpoint_writer.py) copies the content, unless nothing can change it meanwhile,
   and starts a thread.
3. The thread, on a rank that has content, lets the format write files to a temporary folder, syncs and hashes them.
4. That of rank 0 adds the manifest, renames the folder, points `latest` to it (``harness.runs.checkpoint.complete``),
   removes older ones, and starts an upload.
5. ``writer.wait`` raises the thread's error on all ranks, or sets ``writer.complete``. Without checkpoint.async_save,
   ``write`` calls it at once; else the next save, ``keep_best`` and the end of training do.
6. ``resuming.resume`` verifies the hashes of the one that `latest` names; if it is damaged, of the next older one. It
   restores the random streams last. Draws for rows need none: they follow from (seed, epoch, row).

One checkpoint as files is in ``harness.runs.checkpoint``, all of a run in ``harness.runs.checkpoints``, how content
becomes files in ``harness/runs/formats``.
"""

from __future__ import annotations

import time
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from harness.runs.console import working
from harness.runs.weights_file import on_host
from harness.training import hooks
from harness.training.counting import check_losses, collect_waits
from harness.training.optimizer.ema import Ema
from harness.training.optimizer.registry import class_name
from harness.training.reproducibility.determinism import kernels
from harness.training.run import Run
from harness.training.strategies import sharding


class RankState(TypedDict):
    """What each rank has of its own."""

    rng: dict[str, Any]  # its random streams, from ``rng.Streams.plain``
    buffers: dict[str, Tensor]  # on the CPU; empty if there is one rank, whose buffers are in the model
    meter: dict[str, Any]  # from ``Meter.state``


class BesideTheModel(TypedDict):
    """What ``harness verify-resume`` compares at each step besides the model. That of rank 0 is kept; on the others,
    only hooks and the times in ``state`` differ."""

    state: dict[str, Any]  # from ``State.to_dict``
    amp: dict[str, Any]  # the loss scale
    schedule: dict[str, Any]
    hooks: list[dict[str, Any]]  # rank 0's, which a resume gives to all ranks


class Content(BesideTheModel):
    """The content of a checkpoint. In the format ``sharded``, each rank writes its shards of tensors, and rank 0
    the rest."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    optimizer_class: str
    backend: str  # whose amp it was: ``Precision.backend``
    opt_level: str
    ema: dict[str, Any] | None
    ranks: list[RankState]
    seen: Tensor  # the rows that the epoch has used, from ``Coverage.reduced``
    log_offset: int  # bytes of metrics.jsonl before it
    log_sha256: str
    num_ranks: int
    kernels: dict[str, Any]  # with parallel.logical_ranks, on what the bits of a result depend besides the recipe
    data: str  # the fingerprint of the task's data
    order: dict[str, Any]  # the settings on which the order of the rows in an epoch depends


def save(run: Run) -> None:
    """Write a checkpoint of the current step, unless there is one. An error of any rank is raised on all of them, that
    of a thread that writes by ``writer.wait``. Collective."""
    if run.saved_step == run.state.step:
        return
    start = time.perf_counter()
    run.hooks.call(hooks.BEFORE_CHECKPOINT, run)
    with working("writing a checkpoint"):
        _save(run)
    if run.meter.is_running:  # otherwise it is not part of the training time
        run.meter.costs.add({"checkpoint": time.perf_counter() - start})


def _save(run: Run) -> None:
    """Gather the content, and give it to the writer. Collective."""
    state, runtime = run.state, run.runtime
    collect_waits(run)
    check_losses(run)  # a model that has diverged must not become the newest checkpoint
    run.health.weights(state, run.writer.complete)
    state.wall_s = run.wall_s()
    by_process = runtime.gather_to_first(_rank_states(run))
    coverage = run.coverage.reduced(runtime)
    run.writer.wait()  # before the model is gathered, which may need the memory
    shards = run.writer.writes_shards
    log_offset, log_digest = runtime.patiently("syncing the log", lambda: (run.tracker.offset(), run.tracker.digest()))
    content: Content = {
        **beside_the_model(run),
        "model": _state(run, run.module, shards),
        "optimizer": _state(run, run.optimizer, shards),
        "optimizer_class": class_name(run.optimizer),
        "backend": run.precision.backend,
        "opt_level": run.config.precision.opt_level,
        "ema": _state(run, run.ema, shards) if run.ema else None,
        "ranks": [rank_state for of_process in by_process for rank_state in of_process],
        "seen": coverage,
        "log_offset": log_offset,
        "log_sha256": log_digest,
        "num_ranks": run.ranks.num,
        "kernels": kernels(runtime.device) if run.ranks.fixed else {},
        "data": run.task.fingerprint,
        "order": order(run),
    }
    run.writer.write(state.step, {**content} if shards or runtime.rank == 0 else None)
    run.saved_step = state.step


def beside_the_model(run: Run) -> BesideTheModel:
    """Return these parts of this rank."""
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
        weights = _state(run, run.module)
        with run.runtime.together("copying the best weights"):
            tensors = on_host(weights) if run.runtime.rank == 0 else {}

    def write() -> None:
        if run.runtime.rank == 0:
            run.checkpoints.mark_best(run.state.step, tensors, run.folder.weights)

    run.runtime.patiently("keeping the best weights", write)


def _state(run: Run, part: nn.Module | torch.optim.Optimizer | Ema, shards: bool = False) -> dict[str, Any]:
    """Return the state dict of ``part``: with ``shards`` that of this rank, else, on rank 0 only, with sharded tensors
    gathered. Collective."""
    is_first = run.runtime.rank == 0
    if run.parallel.holds_shard and not shards:
        whole: dict[str, Any] = sharding.whole(part.state_dict(), keep=is_first)
        return whole
    return part.state_dict() if shards or is_first else {}


def _rank_states(run: Run) -> list[RankState]:
    """Return the state that differs between ranks, of each rank of this process."""
    return [
        {
            "rng": of_rank["rng"],
            "buffers": {name: buffer.cpu() for name, buffer in of_rank["buffers"].items()},
            "meter": meter,
        }
        for of_rank, meter in zip(run.ranks.state(), run.meter.state(), strict=True)
    ]


def order(run: Run) -> dict[str, Any]:
    """Return the settings on which the order of the rows in an epoch depends."""
    return {"seed": run.config.seed, "data.shard": run.config.data.shard}
