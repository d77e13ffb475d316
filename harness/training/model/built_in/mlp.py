"""A multilayer perceptron."""

from __future__ import annotations

from torch import Tensor, nn


class Model(nn.Module):
    """Two linear layers over the flattened image."""

    def __init__(self, num_classes: int, in_channels: int = 1, hidden: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes) of ``images`` (batch, channels, height, width)."""
        return self.layers(images)
