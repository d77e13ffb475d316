"""Models for tests, named in a configuration by their dotted path."""

from __future__ import annotations

import os
import time

from torch import Tensor, nn


class Slow(nn.Module):
    """A linear model that takes ``step_s`` seconds for each training batch: time to be interrupted in."""

    def __init__(self, num_classes: int, step_s: float = 0.05) -> None:
        super().__init__()
        self.layer, self.step_s = nn.LazyLinear(num_classes), step_s

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        if self.training:
            time.sleep(self.step_s)
        return self.layer(images.flatten(1))


class Raises(Slow):
    """Raises in training step ``step`` (from 1) on rank ``rank`` alone."""

    def __init__(self, num_classes: int, rank: int, step: int) -> None:
        super().__init__(num_classes, 0.0)
        self.rank, self.left = rank, step

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        self.left -= self.training
        if self.left == 0 and int(os.environ.get("RANK", "0")) == self.rank:
            raise ArithmeticError("a layer went wrong, only here")
        return super().forward(images)
