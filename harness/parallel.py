"""How replicas are kept equal: the chosen back end's DistributedDataParallel, delayed or overlapped, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from harness.config import ParallelSection
from harness.errors import ConfigError
from harness.precision import Precision


@dataclass(frozen=True)
class Parallel:
    """The model to call in training, the bare one inside it, and when gradients cross ranks."""

    model: nn.Module
    module: nn.Module
    strategy: str

    def reduce_when(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are averaged over ranks in the ``last`` one only."""
        if last or self.model is self.module:
            return nullcontext()
        return _local(self.model)


@contextmanager
def _local(model: Any) -> Iterator[None]:
    """Gradients stay local. NVIDIA's wrapper has no no_sync(), but the pair of switches that ours has too."""
    model.disable_allreduce()
    try:
        yield
    finally:
        model.enable_allreduce()


def wrap(model: nn.Module, section: ParallelSection, precision: Precision, world_size: int) -> Parallel:
    """``model``, after amp, made one of ``world_size`` equal replicas."""
    if section.strategy == "none" and world_size > 1:
        raise ConfigError(
            f"parallel.strategy=none, but {world_size} processes were started",
            where="parallel.strategy",
            hint="use parallel.strategy=ddp, or start one process",
        )
    if world_size == 1:
        return Parallel(model, model, "one process")
    ddp = precision.distributed.DistributedDataParallel(model, delay_allreduce=section.delay_allreduce)
    return Parallel(ddp, model, "ddp, delayed all-reduce" if section.delay_allreduce else "ddp, overlapped all-reduce")
