"""``harness check``: what a run would do, or everything that is wrong with it, before anything is started."""

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
    """(facts, problems). Each stage that can be looked at without the one before it is looked at."""
    try:
        config = loader.load(path, overrides)
    except HarnessError as error:
        return {}, [error]
    problems: list[HarnessError] = []
    facts: dict[str, Any] = {"run folder": f"{config.output.rstrip('/')}/{config.name}"}

    def look(stage: Any, *arguments: Any) -> Any:
        try:
            return stage(*arguments)
        except HarnessError as error:
            problems.append(error)
            return None

    device = look(devices.choose, config.runtime.device, 0, 1)
    chosen = look(precision.choose, config.precision, device, config.needs_our_amp) if device else None
    task = look(build.open_task, config, Runtime())
    size = look(build.sizes, config, len(task.train), world_size) if task else None
    model = look(build.build_model, config, task) if task else None
    look(metrics_log.require, config.trackers)
    look(_reach, config)
    look(optim.build, config.optimizer, [nn.Parameter(torch.zeros(1))], config.optimizer.lr)
    if model is not None:
        facts["model"] = f"{config.model.name}, {sum(p.numel() for p in model.parameters()):,} parameters"
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            rows = "the global batch" if config.parallel.sync_batchnorm else "its rank's rows"
            facts["batch norm"] = f"over {rows}"
    if size is not None and chosen is not None:
        facts |= build.describe(config, task, size, world_size, device, chosen.backend)
    look(strategy.check_world, config.parallel, world_size)
    return facts, problems


def _reach(config: Config) -> None:
    """See that the store of a run that is kept at a URL answers. Whether it may be written, the start tells."""
    folder = remote.run_folder(config)
    if isinstance(folder, remote.RemoteRunFolder):
        folder.store.files()
