"""How ranks share the work: a replica each (ddp), a shard each (fsdp), one process for all devices (dp), or none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.config.schema import ParallelSection
from harness.errors import ConfigError
from harness.training import fsdp as sharded
from harness.training.precision import Precision

log = logging.getLogger("harness")


@dataclass(frozen=True)
class Parallel:
    """The model to call in training, the bare one inside it, and when gradients cross ranks."""

    model: nn.Module
    module: nn.Module
    strategy: str  # in words
    sharded: bool = False  # forward passes are collective then, and so is reading a whole parameter
    reduces: Callable[[bool], Any] | None = None  # switches the exchange of gradients on and off
    synchronized: tuple[Any, ...] = ()  # batch norms that span all ranks

    def reduce_when(self, last: bool, counts: bool = True) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are averaged over ranks in the ``last`` one only.

        ``counts`` is False where this rank's rows only keep it in step with the others: batch norm over all ranks then
        leaves them out.
        """
        if (last or self.reduces is None) and (counts or not self.synchronized):
            return nullcontext()
        return self._switched(last, counts)

    @contextmanager
    def _switched(self, last: bool, counts: bool) -> Iterator[None]:
        reduces = self.reduces or (lambda on: None)
        reduces(last)
        for norm in self.synchronized:
            norm.idle = not counts
        try:
            yield
        finally:
            reduces(True)
            for norm in self.synchronized:
                norm.idle = False

    @property
    def exchanges(self) -> bool:
        """Whether gradients cross ranks at all."""
        return self.reduces is not None

    @property
    def evaluated(self) -> nn.Module:
        """The model to call in evaluation: no replica waits for another's batch, but dp's devices share one."""
        return self.model if isinstance(self.model, nn.DataParallel) else self.module


def check_world(section: ParallelSection, world_size: int) -> None:
    """Raise ConfigError where the strategy cannot be that of ``world_size`` processes."""
    if section.strategy in ("none", "dp") and world_size > 1:
        drives = "drives all devices of" if section.strategy == "dp" else "is for"
        raise ConfigError(
            f"parallel.strategy={section.strategy} {drives} one process, but there are {world_size} processes",
            where="parallel.strategy",
            hint="use parallel.strategy=ddp, or start one process",
        )


def prepare(
    model: nn.Module, section: ParallelSection, precision: Precision, device: torch.device, world_size: int
) -> nn.Module:
    """What must come before the optimizer, since it changes which parameters there are. Collective under fsdp."""
    check_world(section, world_size)
    if section.sync_batchnorm and world_size > 1:
        model = precision.synchronized(model)
    if section.strategy == "fsdp" and world_size > 1:
        sharded.shard(model, device)
    return model


def wrap(
    model: nn.Module, section: ParallelSection, precision: Precision, device: torch.device, world_size: int
) -> Parallel:
    """``model``, after ``prepare`` and amp, as the loop calls it."""
    if section.strategy == "dp":
        return _data_parallel(model, device)
    if world_size == 1:
        return Parallel(model, model, "one process")
    kind = precision.distributed.SyncBatchNorm if section.sync_batchnorm else ()
    norms = tuple(module for module in model.modules() if isinstance(module, kind))
    spans = ", batch norm over all ranks" if norms else ""
    if section.strategy == "fsdp":
        switch: Any = model.set_requires_gradient_sync
        parts = sum(hasattr(module, "set_requires_gradient_sync") for module in model.modules())
        return Parallel(model, model, f"fsdp in {parts} parts{spans}", True, switch, norms)
    ddp = precision.distributed.DistributedDataParallel(model, delay_allreduce=section.delay_allreduce)

    def reduces(on: bool) -> None:
        # NVIDIA's wrapper has no no_sync(), but this pair, which ours has too.
        ddp.enable_allreduce() if on else ddp.disable_allreduce()

    when = "delayed" if section.delay_allreduce else "overlapped"
    return Parallel(ddp, model, f"ddp, {when} all-reduce{spans}", reduces=reduces, synchronized=norms)


def _data_parallel(model: nn.Module, device: torch.device) -> Parallel:
    """DataParallel over all CUDA devices that this process sees; the plain model where that is one, or a CPU."""
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if count < 2:
        log.warning("parallel.strategy=dp found one device (%s): the model runs there, as with none", device)
        return Parallel(model, model, f"dp on one device ({device})")
    return Parallel(nn.DataParallel(model), model, f"dp on {count} devices")
