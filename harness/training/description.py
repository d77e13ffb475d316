"""What a run will do, for its log, its provenance and ``harness check``; and how it ended."""

from __future__ import annotations

import logging
import shlex
from typing import Any

import torch
from torch import nn

from harness.config.places import HUB
from harness.config.schema import Config
from harness.config.targets import image_column
from harness.data import hub
from harness.distributed import machine
from harness.distributed.runtime import Runtime
from harness.errors import plural
from harness.runs import console, hub_copies, layout, provenance
from harness.training import run_log
from harness.training.model import model_builder
from harness.training.optimizer import emulated_half, trained_parameters
from harness.training.reproducibility import determinism
from harness.training.rows.division import Sizes
from harness.training.run import Run
from harness.training.task import OpenedTask, SupportsLearned, SupportsNewData

log = logging.getLogger("harness")

# What a start shows; the log file also has the rest of what ``harness check`` shows.
_SHOWN = {"run folder", "model", "train rows", "eval rows", "ranks", "device", "steps per epoch", "steps", "amp",
          "parallel", "launcher", "log lines"}  # fmt: skip


def announce(run: Run) -> None:
    """Log what this start will train and on what, and record its provenance. Collective."""
    runtime, config = run.runtime, run.config
    if finished := run.finished():
        _log_nothing_left(run)
    device = {"name": "cpu", "processor": determinism.processor()}
    if runtime.device.type == "cuda":
        device = {"name": torch.cuda.get_device_name(runtime.device)}
    ranks = runtime.gather({"host": runtime.host, "device": str(runtime.device), **device})
    for name, value in _facts(run).items():
        log.info("%14s: %s", name, value, extra={} if name in _SHOWN and not finished else console.IN_FILE)
    first = runtime.rank == 0
    if first and not run.state.step and (slow := emulated_half.warning(config.precision, runtime.device)):
        log.warning("%s", slow)
    if first and not finished:
        _note_few_cores(runtime)
    code = runtime.patiently("asking git for commits", lambda: provenance.code(config) if first else {})
    with runtime.together("recording provenance"):
        if runtime.rank == 0:
            _record_start(run, provenance.of_start(runtime, run.precision.backend, ranks, code))


def _note_few_cores(runtime: Runtime) -> None:
    """Log that ranks on the CPU share cores. Only ranks of one parent may use the same cores as this one."""
    launch, cores = runtime.launch, machine.usable_cores()
    if launch.supervised and runtime.device.type == "cpu" and launch.local_world_size > cores:
        ranks = plural(launch.local_world_size, "rank")
        log.info("%s share %s of this machine; %d would train faster", ranks, plural(cores, "core"), cores)


def _facts(run: Run) -> dict[str, Any]:
    return {
        "run folder": run.folder.where,
        "model": describe_model(run.module),
        **describe(run.config, run.task, run.sizes, run.ranks.num, run.runtime.device, run.precision.backend),
        **trained_parameters.describe(run.optimizer, run.module),
        **run.hooks.describe(),
        "parallel": run.parallel.describe(),
        "launcher": _launcher(run.config, run.runtime),
        "log lines": "loss: mean over the rows of these steps; rows/s: over all ranks; time left: of the whole run",
    }


def _record_start(run: Run, start: dict[str, Any]) -> None:
    """Write the configuration, ``start`` and what it has of this run, and what ``harness predict`` needs."""
    config = run.config
    if not run.finished():
        run.folder.write_config()
        length = {"train.epochs": config.train.epochs, "train.max_steps": config.train.max_steps}
        start["length"] = {"step": run.state.step, **length}
    if run.tracker.damage:
        start["log_damage"] = run.tracker.damage
    start["model"] = {
        "name": model_builder.name_of(run.module),
        "gradient_bytes": sum(param.nbytes for param in run.module.parameters() if param.requires_grad),
        "layers": sum(not any(module.children()) for module in run.module.modules()),
    }
    if run.this_start.weights:
        start["weights"] = run.this_start.weights
    for warning in [*run.folder.repair(run.finished()), *run.folder.add_start(start)]:
        log.warning("%s", warning)
    for name in hub_copies.kept_places(config):
        hub.keep(f"{HUB}{name}", run.folder.path / layout.of_hub(name), renew=run.saved_step < 0)
    run.folder.learned(run.task.learned if isinstance(run.task, SupportsLearned) else {})


def _log_nothing_left(run: Run) -> None:
    """Log that an earlier start has finished the run, and what to type to train longer."""
    train, state = run.config.train, run.state
    ends = (("epochs", train.epochs, state.epoch), ("max_steps", train.max_steps, state.step))
    reached = [
        f"train.{key}=N with N above {now} (now {end})" for key, end, now in ends if end is not None and now >= end
    ]
    longer = f"to train longer, type {' and '.join(reached)}; for a new run, type name=NAME"
    if reason := run.ended_early():
        longer = f"it ended early: {reason}; for a new run, type name=NAME"
    verb = "do" if run.this_start.done_at == state.step else "train"
    log.info("nothing left to %s: step %d was the last; %s", verb, state.step, longer)


def conclude(run: Run, done: bool) -> None:
    """Log the results, or how to resume."""
    state, config = run.state, run.config
    if run.runtime.rank:
        log.info("%s at step %d", "done" if done else "stopped with a checkpoint", state.step, extra=console.OF_NODE)
    if not done:
        launch = run.runtime.launch
        if launch.supervised and not launch.elastic and run.stop.signal is not None:
            log.info("stopped at step %d, with a checkpoint", state.step)  # harness launch prints why, and what next
            return
        log.info(
            "stopped early (%s) at step %d, with a checkpoint; the same command resumes from it",
            run.stop.reason or "by another rank",
            state.step,
        )
        return
    # The reason of a hook or of an own loop is in the log already.
    if not state.ended and (reason := run.ended_early()):
        log.info("training ended early, at step %d: %s", state.step, reason)
    if state.history:
        last = state.history[-1]
        metrics = "  ".join(f"{key} {value:.4f}" for key, value in last.items() if key in config.task.metrics)
        log.info("last validation, at step %d: %s", last["step"], metrics)
    if state.best is not None:
        where = "weights.safetensors has the weights of this step"
        log.info("best %s %.4f at step %d; %s", config.best_metric, state.best, state.best_step, where)
    steps = f"{plural(state.skipped, 'skipped step')}"
    skipped = f" ({state.rows_skipped} of them in {steps})" if state.skipped else ""
    if state.rows:  # a loop of the user's own may not count them
        log.info(
            "throughput: %.0f rows/s in training, over all ranks; %d rows%s in %.1f s with validation and checkpoints",
            run.throughput(), state.rows, skipped, run_log.total_s(run),
        )  # fmt: skip
    if state.bad_rows:
        log.info("training rows that could not be read, which metrics.jsonl names, were replaced %s",
                 plural(state.bad_rows, "time"))  # fmt: skip
    where, predicted = shlex.quote(run.folder.where), (run.folder.path / layout.PREDICTIONS).is_file()
    log.info("run folder: %s%s", run.folder.where, ", with predictions.csv of the validation rows" if predicted else "")
    able = predicted and isinstance(run.config.task, SupportsNewData)
    of_images = "images: harness predict {} --images FOLDER"
    others = of_images if image_column(run.config.task) else "rows: harness predict {} --csv CSV"
    predict = f"; for other {others.format(where)} --out predictions.csv" if able else ""
    log.info("next: harness report %s%s", where, predict)


def _launcher(config: Config, runtime: Runtime) -> str:
    """Return what started the ranks. One process says that it is alone if the configuration asks for more."""
    ranks = config.launch.nnodes * config.launch.nproc
    alone = runtime.launch.alone and ranks > 1
    return f"none (one process; harness launch starts the {ranks} ranks of launch)" if alone else runtime.launch.by


def describe_model(model: nn.Module) -> str:
    every, trained = (sum(p.numel() for p in model.parameters() if p.requires_grad >= only) for only in (False, True))
    share = f", of which {trained:,} are trained" if trained < every else ""
    return f"{model_builder.name_of(model)}, {every:,} parameters{share}"


def describe(
    config: Config, task: OpenedTask, size: Sizes, world_size: int, device: torch.device, backend: str
) -> dict[str, Any]:
    """Return facts about a run, for its log and for ``harness check``."""
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
        "schedule": size.schedule.describe(),
        "amp": emulated_half.describe(config.precision, device, backend),
        "deterministic": determinism.describe(config.train.deterministic),
        "shards": config.data.shard,
    }
