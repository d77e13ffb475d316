"""Handwritten digits: MNIST, in the files that torchvision keeps it in (``harness data mnist DIR`` brings them)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from harness.config.base import Positive
from harness.config.schema import TaskSection

if TYPE_CHECKING:
    from harness.tasks.mnist.task import Images


class Task(TaskSection):
    """60,000 gray images of 28x28 pixels to train on, 10,000 to evaluate on, in ten classes."""

    name: Literal["mnist"]
    root: str = "data/mnist"
    """The folder that `harness data` was given: the images are in root/MNIST/raw, where torchvision looks too."""
    train_rows: Positive | None = None
    """Train on the first so many images only; null: all."""
    eval_rows: Positive | None = None
    """Evaluate on the first so many images only; null: all."""

    metrics: ClassVar[dict[str, Literal["max", "min"]]] = {
        "top1": "max",
        "top5": "max",
        "loss": "min",
        "mean_class_accuracy": "max",
    }
    kind: ClassVar[Literal["MNIST", "FashionMNIST"]] = "MNIST"
    """torchvision's name of the data set, and of the folder that it keeps it in."""
    mean: ClassVar[float] = 0.1307  # of all training pixels, on the scale 0 to 1
    std: ClassVar[float] = 0.3081

    def open(self, seed: int, cache_dir: Path | None) -> Images:
        """The images, mapped from their files. Raises DataError."""
        from harness.tasks.mnist import task

        return task.mapped(self)
