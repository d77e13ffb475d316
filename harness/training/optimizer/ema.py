"""Moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from harness.training.strategies.sharding import local, part_like


class Ema:
    """An exponential moving average of the trainable parameters ``params``, in float32.

    ``sources`` are the tensors that the optimizer updates (masters, if there are any), in the order of ``params``.
    The decay after n updates is min(decay, (1 + n) / (10 + n)), so that the average forgets the initial weights.
    """

    def __init__(self, params: Sequence[Tensor], sources: Sequence[Tensor], decay: float) -> None:
        self.params = list(params)
        self.decay = decay
        self.num_updates = 0
        self.average = [source.detach().float().clone() for source in sources]  # sharded where the sources are

    @torch.no_grad()
    def start(self, sources: Iterable[Tensor]) -> None:
        """Begin a new average with the weights ``sources``."""
        self.num_updates = 0
        torch._foreach_copy_(self._local(), [local(source.detach()) for source in sources])

    @torch.no_grad()
    def update(self, sources: Iterable[Tensor]) -> None:
        """Add the weights after an applied update, without a host sync."""
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        self.num_updates += 1
        values = [local(source.detach()) for source in sources]
        if any(value.dtype != torch.float32 for value in values):
            values = [value.float() for value in values]
        torch._foreach_lerp_(self._local(), values, 1 - decay)  # private, but what torch.optim.swa_utils calls too

    def _local(self) -> list[Tensor]:
        """This rank's shards of the average."""
        return [local(average) for average in self.average]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the model holds the averaged weights."""
        params = [local(param.detach()) for param in self.params]
        saved = [param.clone() for param in params]
        torch._foreach_copy_(params, self._local())
        try:
            yield
        finally:  # the first forward pass of a sharded model may have moved its shards
            torch._foreach_copy_([local(param.detach()) for param in self.params], saved)

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_updates = state["num_updates"]
        for mine, loaded in zip(self.average, state["average"], strict=True):
            mine.copy_(part_like(mine, loaded))
