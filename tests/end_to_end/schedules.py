"""A schedule for tests, named in a configuration by its dotted path."""

from __future__ import annotations

import random

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Walk(LRScheduler):
    """Multiplies the rate by ``factor`` or divides it, by draws from a stream of its own, which it saves."""

    def __init__(self, optimizer: Optimizer, factor: float) -> None:
        self.factor, self._stream = factor, random.Random(0)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        power = self._stream.choice((-1, 1))
        return [group["lr"] * self.factor**power for group in self.optimizer.param_groups]

    def state_dict(self) -> dict:
        state = {key: value for key, value in super().state_dict().items() if key != "_stream"}
        return {**state, "stream": self._stream.getstate()}

    def load_state_dict(self, state: dict) -> None:
        self._stream.setstate(state["stream"])
        super().load_state_dict({key: value for key, value in state.items() if key != "stream"})
