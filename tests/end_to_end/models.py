"""Models for tests, named in a configuration by their dotted path."""

from __future__ import annotations

import os
import time

from torch import Tensor, nn


class Slow(nn.Module):
    """A linear model whose training batches take ``step_s`` seconds, until a file named ``until`` exists."""

    def __init__(self, num_classes: int, step_s: float = 0.05, until: str | None = None) -> None:
        super().__init__()
        self.layer, self.step_s, self.until = nn.LazyLinear(num_classes), step_s, until

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        if self.training and not (self.until and os.path.exists(self.until)):
            time.sleep(self.step_s)
        return self.layer(images.flatten(1))


class Raises(Slow):
    """Raises in training step ``step`` (from 1), only on rank ``rank``."""

    def __init__(self, num_classes: int, rank: int, step: int) -> None:
        super().__init__(num_classes, 0.0)
        self.rank, self.left = rank, step

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        self.left -= self.training
        if self.left == 0 and int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == self.rank:
            raise ArithmeticError("a layer went wrong, only here")
        return super().forward(images)


class Overflowing(nn.Module):
    """A linear model with gradients so large that float16 overflows until the loss scale is reduced."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        return self.layer(images.flatten(1)) * 16


class NanAtStep(nn.Module):
    """A linear model that yields NaN in training step ``step`` (from 1), only on rank ``rank`` if one is given."""

    def __init__(self, num_classes: int, step: int, rank: int | None = None) -> None:
        super().__init__()
        self.layer, self.left = nn.LazyLinear(num_classes), step
        self.here = rank is None or int(os.environ.get("RANK", "0")) == rank

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        self.left -= self.training
        logits = self.layer(images.flatten(1))
        return logits * float("nan") if self.training and self.left == 0 and self.here else logits


class BatchNormed(nn.Module):
    """Batch norm over vectors, which cannot train on a single row."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        return self.layers(images)
