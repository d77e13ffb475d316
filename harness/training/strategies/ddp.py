"""Data parallelism: each rank has a replica of the model, and gradients are averaged over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.training.strategies.base import ParallelStrategy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.training.logical_ranks import GradientTree

_NO_SUM = (
    "this loop leaves out what parallel.logical_ranks needs, so the gradients of the logical ranks were not summed",
    "as in docs/python_api.md, enter run.parallel.micro_batch(micro, last) for each micro-batch, and call "
    "run.parallel.backward(scaled, micro.ends) in it; or remove parallel.logical_ranks",
)


class Strategy(ParallelStrategy):
    """Replicas in Apex's DistributedDataParallel; with parallel.logical_ranks, the bare model and a sum in a fixed
    order. One process without them has the bare model."""

    _tree: GradientTree | None = None

    def wrap(self, model: nn.Module) -> None:
        super().wrap(model)
        if self.section.logical_ranks:
            from harness.training.logical_ranks import GradientTree

            self._tree = GradientTree([param for param in model.parameters() if param.requires_grad], self.ranks)
            self.exchanges, self.no_pass = True, _NO_SUM
            self.summary = f"ddp, {self.ranks.num} logical ranks on {self.world_size} processes, summed in a tree"
        elif self.world_size > 1:
            delayed = self.section.delay_allreduce
            self._ddp = self.precision.parallel.DistributedDataParallel(model, delay_allreduce=delayed)
            self.model, self.exchanges = self._ddp, True
            self.summary = f"ddp, {'delayed' if delayed else 'overlapped'} all-reduce"

    def backward(self, loss: Tensor, ends: bool) -> None:
        super().backward(loss, ends)
        if self._tree is not None and ends:
            self._tree.collect()

    def switch_sync(self, on: bool) -> None:
        if self._tree is None:  # NVIDIA's wrapper has this pair instead of no_sync(), and so has ours.
            self._ddp.enable_allreduce() if on else self._ddp.disable_allreduce()

    def num_synced_passes(self) -> int | None:
        """Return None with NVIDIA's wrapper, which does not count."""
        return getattr(self._tree or self._ddp, "num_passes", None) if self.exchanges else None
