"""Examine a configuration before anything is started: what a run would do, or every error."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from harness.config import loader, presets
from harness.config.schema import Config
from harness.data.loader_workers import MIB, MORE_SHARED_MEMORY, PREFETCH, SHARED_MEMORY
from harness.distributed import devices, stack
from harness.distributed.runtime import Runtime
from harness.errors import ConfigError, HarnessError, TrainingError, first_line, plural, readable
from harness.runs import remote
from harness.trackers import metrics_log
from harness.training import build, determinism, on_gradients, optim, precision, recompute, rehearsal, strategy, weights
from harness.training.task import OpenedTask, SupportsSample


def examine(
    path: str, overrides: Sequence[str], world_size: int, limit_s: float = build.FILES_S
) -> tuple[dict[str, Any], list[HarnessError]]:
    """(facts, errors). A stage is left out only if it needs the result of one that failed. ``limit_s``: for a look for
    the files that the rows name, for decoding a sample of them, and for a step and an evaluation on a few rows."""
    try:
        config = loader.load(path, overrides)
    except HarnessError as error:
        return {}, [error]
    errors: list[HarnessError] = []
    facts: dict[str, Any] = {"run folder": f"{config.output.rstrip('/')}/{config.name}"}

    def attempt(stage: Any, *arguments: Any) -> Any:
        try:
            return stage(*arguments)
        except HarnessError as error:
            errors.append(error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of the user's own task, model or optimizer, which may call sys.exit
            hint = "harness train prints the traceback"
            what = f"{type(error).__name__}: {first_line(readable(error))}"
            errors.append(TrainingError(what, where=stack.raised_at(error), hint=hint))
        return None

    device = attempt(devices.choose, config.runtime.device, 0, 1)
    chosen = attempt(precision.choose, config.precision, device, config.needs_our_amp) if device else None
    task = attempt(build.open_task, config, Runtime(), limit_s)
    if task is None:
        errors += [error for error in config.task.problems() if str(error) not in map(str, errors)]
    size = attempt(build.sizes, config, len(task.train), world_size) if task else None
    model = attempt(build.build_model, config, task) if task else None
    sampled: str | None = None
    attempt(metrics_log.require, config.trackers)
    attempt(_reach, config)
    if config.train.on_gradients:
        attempt(on_gradients.find, config.train.on_gradients)
    if model is None or size is None:
        attempt(optim.build, config.optimizer, [nn.Parameter(torch.zeros(1))], config.optimizer.lr)
    optimizer = None
    if model is not None:
        attempt(build.require_mixable, config, task)
        if device is not None:
            attempt(determinism.require_restorable, model, device, config.train.deterministic)
        facts["model"] = f"{config.model.name}, {sum(p.numel() for p in model.parameters()):,} parameters"
        if config.model.weights is not None and (given := attempt(weights.load, model, config)):
            facts["weights"] = "; ".join(filter(None, [given["summary"], given["warning"]]))
        if again := attempt(recompute.apply, model, config.model.activation_checkpointing):
            shown = ", ".join(again if len(again) <= 4 else [*again[:3], "...", again[-1]])
            facts["recomputed"] = f"{plural(len(again), 'module')} in the backward pass: {shown}"
        if size is not None and (groups := attempt(optim.groups, config.optimizer, model, size.lr)):
            optimizer = attempt(optim.build, config.optimizer, groups, size.lr)
            facts |= optim.described(optimizer, model) if optimizer else {}
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            rows = "the global batch" if config.parallel.sync_batchnorm else "the rows of each rank"
            facts["batch norm"] = f"over {rows}"
    if size is not None and chosen is not None:
        facts |= build.describe(config, task, size, world_size, device, chosen.backend)
        if warning := build.too_few_rows(size, len(task.train)):
            facts["warning"] = warning
        facts["preset"] = f"{facts['preset']}; choose another with extends: preset:NAME"
        facts |= presets.described(config)
        if isinstance(task, SupportsSample) and model is not None and (sampled := attempt(task.sample, limit_s)):
            facts["files"] = sampled
        if model is not None and optimizer is not None and (sampled or not isinstance(task, SupportsSample)):
            candidate = rehearsal.Candidate(config, task, model, optimizer, size, device)
            attempt(_rehearse, candidate, world_size, limit_s, facts)
            attempt(_shared_memory, config, task, size, -(-world_size // config.launch.nnodes), facts)
    attempt(strategy.check_world, config.parallel, world_size)
    return facts, errors


def _rehearse(candidate: rehearsal.Candidate, world_size: int, limit_s: float, facts: dict[str, Any]) -> None:
    """Add to ``facts`` what a step and an evaluation on a few rows found: operations that CUDA cannot do
    deterministically, and the memory of a rank. Raises ConfigError if the device refuses or lacks them."""
    found = rehearsal.rehearse(candidate, limit_s)
    level, operations = candidate.config.train.deterministic, found.audit.found if found.audit else set()
    facts["one batch"] = str(found)
    facts["deterministic"] = determinism.described(level, operations | determinism.unrestorable(candidate.model))
    if operations and level is True and candidate.device.type == "cuda":
        raise determinism.refused(operations)
    if found.parts:
        facts["memory"] = rehearsal.require_memory(candidate, found.parts, world_size)


def _shared_memory(config: Config, task: OpenedTask, size: build.Sizes, num_ranks: int, facts: dict[str, Any]) -> None:
    """Add what the batches of the loader workers of ``num_ranks`` ranks occupy to ``facts``. Raises ConfigError if
    /dev/shm has less."""
    workers, row = config.data.num_workers, task.train.batch(np.zeros(1, np.int64), 0)
    if not workers or not Path(SHARED_MEMORY).is_dir():
        return
    rows = max(size.micro_batch, min(size.eval_batch, len(task.eval)))
    batch_mib = rows * (row.inputs.nbytes + row.targets.nbytes) / MIB
    needed = batch_mib * num_ranks * (workers * PREFETCH + 1)  # and the batch that the rank works on
    usage = shutil.disk_usage(SHARED_MEMORY)
    ranks = f"{plural(num_ranks, 'rank')}"
    loaders = f"{plural(workers, 'worker')}"
    facts["shared memory"] = (
        f"up to {needed:.1f} MiB for batches of {batch_mib:.1f} MiB: {ranks} x ({loaders} x "
        f"{PREFETCH} + 1); {SHARED_MEMORY} has {usage.free / MIB:.0f} MiB free"
    )
    if needed > usage.free / MIB:
        raise ConfigError(
            f"the loader workers of this machine need up to {needed:.1f} MiB in {SHARED_MEMORY}, which has "
            f"{usage.free / MIB:.1f} of {usage.total / MIB:.1f} MiB free",
            where="data.num_workers",
            hint=MORE_SHARED_MEMORY,
        )


def _reach(config: Config) -> None:
    """Raise HarnessError if ``output`` is a URL that does not answer. Write access is checked only at the start."""
    folder = remote.run_folder(config)
    if isinstance(folder, remote.RemoteRunFolder):
        folder.store.files()
