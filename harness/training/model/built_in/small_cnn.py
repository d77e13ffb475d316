"""A small convolutional network for small images."""

from __future__ import annotations

from torch import Tensor, nn


class Model(nn.Module):
    """Three 3x3 convolutions, adaptive average pooling and a linear layer: for small images such as digits."""

    def __init__(
        self, num_classes: int, in_channels: int = 1, width: int = 32, dropout: float = 0.0, batch_norm: bool = False
    ) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> list[nn.Module]:
            norm: list[nn.Module] = [nn.BatchNorm2d(outputs)] if batch_norm else []
            return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=not batch_norm), *norm, nn.ReLU()]

        self.features = nn.Sequential(
            *block(in_channels, width), *block(width, 2 * width), nn.MaxPool2d(2), *block(2 * width, 2 * width)
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * width * 4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes) of ``images`` (batch, channels, height, width)."""
        return self.classifier(self.dropout(quarters(self.features(images)).flatten(1)))


def quarters(images: Tensor) -> Tensor:
    """Return adaptive_avg_pool2d(images, 2), whose own backward pass is not deterministic on CUDA.

    (batch, channels, height, width) -> (batch, channels, 2, 2). Each window is half of the image, rounded up.
    """
    height, width = (max(2, size) for size in images.shape[-2:])  # a single row or column is both halves
    images = images.expand(-1, -1, height, width)
    window, stride = (-(-height // 2), -(-width // 2)), (height // 2, width // 2)
    return nn.functional.avg_pool2d(images, window, stride)
