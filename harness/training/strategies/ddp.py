"""Data parallelism: each rank has a replica of the model, and gradients are averaged over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.training.strategies.base import ParallelStrategy

if TYPE_CHECKING:
    from torch import nn


class Strategy(ParallelStrategy):
    """Replicas in Apex's DistributedDataParallel. One process has the bare model."""

    def wrap(self, model: nn.Module) -> None:
        super().wrap(model)
        if self.world_size == 1:
            return
        delayed = self.section.delay_allreduce
        self._ddp = self.precision.distributed.DistributedDataParallel(model, delay_allreduce=delayed)
        self.model, self.exchanges = self._ddp, True
        self.summary = f"ddp, {'delayed' if delayed else 'overlapped'} all-reduce"

    def switch_sync(self, on: bool) -> None:
        # NVIDIA's wrapper has this pair instead of no_sync(), and so has ours.
        self._ddp.enable_allreduce() if on else self._ddp.disable_allreduce()

    def num_passes(self) -> int | None:
        """None with NVIDIA's wrapper, which does not count them."""
        return getattr(self._ddp, "num_passes", None) if self.exchanges else None
