"""The network that FashionMNIST tutorials use."""

from __future__ import annotations

from torch import Tensor, nn


class Model(nn.Module):
    """Two blocks of 3x3 convolution, batch norm and pooling, then three linear layers with dropout but no activation.

    An image of 28x28 pixels gives 2,304 features, which the linear layers reduce to 600, 120 and the classes.
    """

    def __init__(self, num_classes: int, in_channels: int = 1, dropout: float = 0.25) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.LazyLinear(600), nn.Dropout(dropout), nn.Linear(600, 120), nn.Linear(120, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes) of ``images`` (batch, channels, height, width)."""
        return self.classifier(self.features(images))
