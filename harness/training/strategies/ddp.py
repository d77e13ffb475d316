"""Data parallelism: each rank has a replica of the model, and gradients are averaged over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from harness.errors import TrainingError
from harness.training.strategies.base import ParallelStrategy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.data.rank_data import MicroBatch
    from harness.training.reproducibility.logical_ranks import GradientTree

_NO_GRADIENT = (
    "no parameter of the model received a gradient: the loss of this rank depends on none of them",
    "every rank must use at least one parameter in each step: add 0 * output.sum() to the loss",
)
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
            from harness.training.reproducibility.logical_ranks import GradientTree

            self._tree = GradientTree([param for param in model.parameters() if param.requires_grad], self.ranks)
            self.exchanges = True
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

    @contextmanager
    def micro_batch(self, micro: MicroBatch, last: bool) -> Iterator[None]:
        """Raises TrainingError if the ``last`` backward pass averaged no gradient: the other ranks would wait for this
        one."""
        before = self._num_passes()
        with super().micro_batch(micro, last):
            yield
            if last and before is not None and self._num_passes() == before:
                text, hint = _NO_GRADIENT if self._tree is None else _NO_SUM
                raise TrainingError(text, hint=hint)

    def check_own_loop(self) -> None:
        if self._tree is not None and not self._tree.num_passes:
            raise TrainingError(_NO_SUM[0], hint=_NO_SUM[1])

    def _num_passes(self) -> int | None:
        """Return how many backward passes have averaged gradients; None with NVIDIA's wrapper, which does not count."""
        return getattr(self._tree or self._ddp, "num_passes", None) if self.exchanges else None
