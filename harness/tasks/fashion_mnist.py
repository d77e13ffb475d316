"""Images of clothes: FashionMNIST, which has the files and the shape of MNIST."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from harness.config.base import Mark, Place
from harness.tasks.mnist import config


class Task(config.Task):
    """60,000 gray images of 28x28 pixels to train on, 10,000 to evaluate on, in ten classes."""

    name: Literal["fashion_mnist"]  # type: ignore[assignment]
    """Classifies images of clothing."""
    root: Annotated[Place, Mark.OF_MACHINE] = "data/fashion_mnist"
    """The folder given to `harness data`. The images are in root/FashionMNIST/raw, as in torchvision."""

    kind: ClassVar[Literal["MNIST", "FashionMNIST"]] = "FashionMNIST"
    mean: ClassVar[float] = 0.2860
    std: ClassVar[float] = 0.3530
