"""Examine a configuration before anything is started: what a run would do, or every error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from harness.config import loader
from harness.config.schema import Config
from harness.distributed import devices
from harness.distributed.runtime import Runtime
from harness.errors import HarnessError
from harness.runs import remote
from harness.trackers import metrics_log
from harness.training import build, optim, precision, strategy


def examine(path: str, overrides: Sequence[str], world_size: int) -> tuple[dict[str, Any], list[HarnessError]]:
    """(facts, errors). A stage is left out only if it needs the result of one that failed."""
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
            return None

    device = attempt(devices.choose, config.runtime.device, 0, 1)
    chosen = attempt(precision.choose, config.precision, device, config.needs_our_amp) if device else None
    task = attempt(build.open_task, config, Runtime())
    size = attempt(build.sizes, config, len(task.train), world_size) if task else None
    model = attempt(build.build_model, config, task) if task else None
    attempt(metrics_log.require, config.trackers)
    attempt(_reach, config)
    attempt(optim.build, config.optimizer, [nn.Parameter(torch.zeros(1))], config.optimizer.lr)
    if model is not None:
        facts["model"] = f"{config.model.name}, {sum(p.numel() for p in model.parameters()):,} parameters"
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            rows = "the global batch" if config.parallel.sync_batchnorm else "the rows of its rank"
            facts["batch norm"] = f"over {rows}"
    if size is not None and chosen is not None:
        facts |= build.describe(config, task, size, world_size, device, chosen.backend)
    attempt(strategy.check_world, config.parallel, world_size)
    return facts, errors


def _reach(config: Config) -> None:
    """Raise HarnessError if ``output`` is a URL that does not answer. Write access is checked only at the start."""
    folder = remote.run_folder(config)
    if isinstance(folder, remote.RemoteRunFolder):
        folder.store.files()
