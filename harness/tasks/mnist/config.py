"""Handwritten digits: MNIST, in the files that torchvision uses (``harness data mnist DIR`` downloads them)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from harness.config.base import LocalPlace, Mark, NullIsEmpty, Positive
from harness.config.targets import LabelledTask
from harness.config.transforms import TransformsSection


class Task(LabelledTask):
    """60,000 gray images of 28x28 pixels to train on, 10,000 to evaluate on, in ten classes."""

    name: Literal["mnist"]
    """Classifies handwritten digits."""
    root: Annotated[LocalPlace, Mark.OF_MACHINE] = "data/mnist"
    """The folder given to `harness data`. The images are in root/MNIST/raw, as in torchvision."""
    train_rows: Positive | None = None
    """Train on the first N images only, such as 1000; null: all."""
    eval_rows: Positive | None = None
    """Evaluate on the first N images only, such as 500; null: all."""
    transforms: Annotated[TransformsSection, NullIsEmpty] = TransformsSection()
    """Transforms of each image, as lists of torchvision.transforms.v2 classes (docs/augmentation.md). Images that are
    not 28x28 afterwards are center-cropped and scaled to this size.
    """
    kind: ClassVar[Literal["MNIST", "FashionMNIST"]] = "MNIST"
    """torchvision's name for the dataset and its folder."""
    mean: ClassVar[float] = 0.1307  # over all training pixels, scaled to [0, 1]
    std: ClassVar[float] = 0.3081
