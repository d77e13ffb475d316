"""Image classification from an annotation CSV: a column of image paths and a column of labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from harness.config.base import Fraction, Section
from harness.config.schema import TaskSection

if TYPE_CHECKING:
    from harness.tasks.image_csv.task import ImageCsv

_CHANNELS = {"rgb": 3, "gray": 1}


class Augment(Section):
    """Random changes of training images; each is drawn anew for every row and epoch."""

    crop_padding: Annotated[int, Field(ge=0)] = 0
    """Pad by this many pixels and crop back at random: a shift."""
    random_resized_crop: bool = False
    """Crop a random part (8 to 100 % of the area) and scale it to task.image_size, which must be set."""
    horizontal_flip: Fraction = 0.0
    """Probability of mirroring."""
    rotation: Annotated[float, Field(ge=0, le=180)] = 0.0
    """Largest rotation, in degrees."""


class Task(TaskSection):
    """A CSV (or Parquet file) with an image path and a label a row."""

    name: Literal["image_csv"]
    train_csv: str
    """Annotations to train on: .csv, .csv.gz or .parquet, local or an fsspec URL."""
    eval_csv: str
    """Annotations to evaluate on; every label must occur in train_csv."""
    root: str = ""
    """Folder that image paths are relative to; empty: the working folder."""
    path_column: str = "path"
    label_column: str = "label"
    image_size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = Field(
        default=None, strict=False
    )
    """[height, width] to scale images to; null: all have the same size already."""
    color: Literal["rgb", "gray"] = "rgb"
    mean: tuple[float, ...] | None = Field(default=None, strict=False)
    """A value a channel, on the scale 0 to 1, taken off each pixel; null: 0.5."""
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(default=None, strict=False)
    """A value a channel that pixels are divided by after that; null: 0.5."""
    augment: Augment = Augment()
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target spread evenly over all classes, in training."""
    on_bad_image: Literal["error", "skip"] = "error"
    """A missing or corrupt image ends the run, or is counted and replaced by the next readable row."""

    metrics: ClassVar[dict[str, Literal["max", "min"]]] = {
        "top1": "max",
        "top5": "max",
        "loss": "min",
        "mean_class_accuracy": "max",
    }

    @field_validator("mean", "std")
    @classmethod
    def _one_value_a_channel(cls, values: tuple[float, ...] | None, info: ValidationInfo) -> tuple[float, ...] | None:
        channels = _CHANNELS.get(info.data.get("color", ""))
        if values is not None and channels is not None and len(values) != channels:
            raise ValueError(f"{len(values)} values, but task.color={info.data['color']} has {channels} channel(s)")
        return values

    @field_validator("augment")
    @classmethod
    def _crop_has_a_size(cls, augment: Augment, info: ValidationInfo) -> Augment:
        if augment.random_resized_crop and info.data.get("image_size", ()) is None:
            raise ValueError("random_resized_crop scales to task.image_size, which is not set")
        return augment

    @property
    def channels(self) -> int:
        return _CHANNELS[self.color]

    def open(self, seed: int, cache_dir: Path | None) -> ImageCsv:
        """The annotation tables, opened (and converted, where this is the first time). Raises DataError."""
        from harness.tasks.image_csv import task

        return task.annotated(self, seed, cache_dir)

    def open_new(self, learned: dict[str, Any], source: str, cache_dir: Path | None) -> ImageCsv:
        """The table ``source`` to guess the classes of; labels are taken as they are written, if there are any."""
        from harness.tasks.image_csv import task

        return task.to_guess(self, learned, source, cache_dir)
