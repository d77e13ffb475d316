"""The network of PyTorch's MNIST example."""

from __future__ import annotations

from torch import Tensor, nn


class Model(nn.Module):
    """Two 3x3 convolutions, pooling, and two linear layers, each after dropout.

    It returns logits, where PyTorch's example returns log-probabilities: the loss applies the softmax.
    """

    def __init__(self, num_classes: int, in_channels: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Dropout(0.25), nn.Flatten(), nn.LazyLinear(128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, num_classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes) of ``images`` (batch, channels, height, width)."""
        return self.layers(images)
