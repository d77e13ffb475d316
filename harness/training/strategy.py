"""Parallel strategies: a replica per rank (ddp), shards (fsdp), one process for all devices (dp), or none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.config.schema import ParallelSection
from harness.errors import ConfigError, TrainingError, plural
from harness.training import fsdp
from harness.training.precision import Precision

log = logging.getLogger("harness")


@dataclass(frozen=True)
class ParallelModel:
    """The wrapped model that training calls, the bare one inside it, and when gradients are averaged over ranks."""

    model: nn.Module
    module: nn.Module
    strategy: str  # described for the log
    sharded: bool = False  # forward passes, and reading a whole parameter, are collective then
    switch_sync: Callable[[bool], Any] | None = None  # turns the averaging of gradients on and off
    sync_norms: tuple[Any, ...] = ()  # batch norms over the rows of all ranks
    num_passes: Callable[[], int] | None = None  # backward passes that averaged gradients, where they can be counted

    def sync_gradients(self, last: bool, counts: bool = True) -> AbstractContextManager[Any]:
        """Context for forward and backward of a micro-batch: gradients are averaged only in the ``last`` one.

        ``counts`` is False if the rows only keep this rank in step with the others; batch norms over all ranks then
        leave them out. Raises TrainingError if the backward pass of the ``last`` one reached no parameter: the other
        ranks would wait for this one.
        """
        if (last or self.switch_sync is None) and (counts or not self.sync_norms) and self.num_passes is None:
            return nullcontext()
        return self._switched(last, counts)

    @contextmanager
    def _switched(self, last: bool, counts: bool) -> Iterator[None]:
        switch = self.switch_sync or (lambda on: None)
        switch(last)
        for norm in self.sync_norms:
            norm.idle = not counts
        before = self.num_passes() if self.num_passes else 0
        try:
            yield
            if last and self.num_passes and self.num_passes() == before:
                raise TrainingError(
                    "no parameter of the model received a gradient: the loss of this rank depends on none of them",
                    hint="every rank must use at least one parameter in each step: add 0 * output.sum() to the loss",
                )
        finally:
            switch(True)
            for norm in self.sync_norms:
                norm.idle = False

    @property
    def exchanges(self) -> bool:
        """True if gradients cross ranks at all."""
        return self.switch_sync is not None

    def devices(self, own: torch.device) -> list[torch.device]:
        """The devices on which this rank computes: all under dp, else its ``own``."""
        if isinstance(self.model, nn.DataParallel):
            return [torch.device("cuda", index) for index in self.model.device_ids]
        return [own]

    @property
    def evaluated(self) -> nn.Module:
        """The model to call in evaluation: the bare one, so that no rank waits for another; dp is one rank."""
        return self.model if isinstance(self.model, nn.DataParallel) else self.module


def check_world(section: ParallelSection, world_size: int) -> None:
    """Raise ConfigError if the strategy does not support ``world_size`` processes."""
    if section.strategy in ("none", "dp") and world_size > 1:
        raise ConfigError(
            f"parallel.strategy={section.strategy} runs in one process, but {world_size} were started",
            where="parallel.strategy",
            hint="use parallel.strategy=ddp, or start one process",
        )
    if world_size == 1 and section.param_dtype != "float32":
        raise ConfigError(
            f"parallel.param_dtype={section.param_dtype} is the dtype of gathered weights, but there is only one "
            "process",
            where="parallel.param_dtype",
            hint="start several processes, or remove it; precision.opt_level=O4 computes in bfloat16",
        )


def shards(section: ParallelSection, world_size: int) -> bool:
    """True if each rank holds a part of the weights."""
    return section.strategy == "fsdp" and world_size > 1


def prepare(
    model: nn.Module, section: ParallelSection, precision: Precision, device: torch.device, world_size: int
) -> nn.Module:
    """Make the changes that replace parameters or modules, before the optimizer is built. Collective under fsdp."""
    check_world(section, world_size)
    if section.sync_batchnorm and world_size > 1:
        model = precision.synchronized(model)
    if shards(section, world_size):
        types = (getattr(torch, section.param_dtype), getattr(torch, section.reduce_dtype))
        fsdp.shard(model, device, fsdp.MIN_BLOCK, *types)
    return model


def wrap(
    model: nn.Module, section: ParallelSection, precision: Precision, device: torch.device, world_size: int
) -> ParallelModel:
    """Wrap ``model`` for training, after ``prepare`` and amp."""
    if section.strategy == "dp":
        return _data_parallel(model, device)
    if world_size == 1:
        return ParallelModel(model, model, "one process")
    kind = precision.distributed.SyncBatchNorm if section.sync_batchnorm else ()
    norms = tuple(module for module in model.modules() if isinstance(module, kind))
    spans = ", batch norm over all ranks" if norms else ""
    if section.strategy == "fsdp":
        switch: Any = model.set_requires_gradient_sync
        types = "" if section.param_dtype == "float32" else f" of {section.param_dtype}"
        parts = sum(hasattr(module, "set_requires_gradient_sync") for module in model.modules())
        return ParallelModel(model, model, f"fsdp in {plural(parts, 'part')}{types}{spans}", True, switch, norms)
    ddp = precision.distributed.DistributedDataParallel(model, delay_allreduce=section.delay_allreduce)

    def switch_sync(on: bool) -> None:
        # NVIDIA's wrapper has this pair instead of no_sync(), and so has ours.
        ddp.enable_allreduce() if on else ddp.disable_allreduce()

    when = "delayed" if section.delay_allreduce else "overlapped"
    num_passes = (lambda: ddp.num_passes) if hasattr(ddp, "num_passes") else None  # not in NVIDIA's
    return ParallelModel(
        ddp, model, f"ddp, {when} all-reduce{spans}", switch_sync=switch_sync, sync_norms=norms, num_passes=num_passes
    )


def _data_parallel(model: nn.Module, device: torch.device) -> ParallelModel:
    """DataParallel over all visible CUDA devices; the bare model if there is one device, or a CPU."""
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if count < 2:
        log.warning("parallel.strategy=dp found only one device (%s), so it acts as parallel.strategy=none", device)
        return ParallelModel(model, model, f"dp on one device ({device})")
    return ParallelModel(nn.DataParallel(model), model, f"dp on {count} devices")
