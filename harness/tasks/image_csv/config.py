"""Image classification from an annotation CSV: one column of image paths and one of labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from harness.config.base import Fraction, Place, Section
from harness.config.schema import TaskSection

if TYPE_CHECKING:
    from harness.tasks.image_csv.task import ImageCsv

_CHANNELS = {"rgb": 3, "gray": 1}
Side = Annotated[int, Field(ge=1, le=2**16)]  # pixels


class Augment(Section):
    """Random changes of training images, drawn for each row and epoch."""

    crop_padding: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Pad by this many pixels on each side and crop back at random: a random shift."""
    random_resized_crop: bool = False
    """Crop a random part (8 to 100 % of the area) and scale it to task.image_size, which must be set."""
    horizontal_flip: Fraction = 0.0
    """Probability of a horizontal flip."""
    rotation: Annotated[float, Field(ge=0, le=180)] = 0.0
    """Largest rotation, in degrees."""


class Task(TaskSection):
    """A CSV (or Parquet file) with one image path and one label per row."""

    name: Literal["image_csv"]
    """Classifies the images that an annotation CSV names."""
    train_csv: Place
    """Annotations to train on: .csv, .csv.gz or .parquet, local or an fsspec URL."""
    eval_csv: Place
    """Annotations to evaluate on; every label must occur in train_csv."""
    root: str = ""
    """Folder that image paths are relative to; empty: the working directory."""
    path_column: str = "path"
    """Column of the CSV with the paths of the images."""
    label_column: str = "label"
    """Column of the CSV with the labels."""
    image_size: tuple[Side, Side] | None = Field(default=None, strict=False)
    """[height, width] to scale images to; null: all images have the same size already."""
    color: Literal["rgb", "gray"] = "rgb"
    """Channels that images are converted to: three (rgb) or one (gray)."""
    mean: tuple[float, ...] | None = Field(default=None, strict=False)
    """One value per channel, subtracted from pixels scaled to [0, 1]; null: 0.5."""
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(default=None, strict=False)
    """One value per channel that pixels are then divided by; null: 0.5."""
    augment: Augment = Augment()
    """Random changes of training images; {}: none."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target spread evenly over all classes, in training."""
    on_bad_image: Literal["error", "skip"] = "error"
    """A missing or corrupt image ends the run (error), or is counted and replaced by the next readable row (skip)."""

    metrics: ClassVar[dict[str, Literal["max", "min"]]] = {
        "top1": "max",
        "top5": "max",
        "loss": "min",
        "mean_class_accuracy": "max",
    }

    @field_validator("mean", "std")
    @classmethod
    def _one_value_per_channel(cls, values: tuple[float, ...] | None, info: ValidationInfo) -> tuple[float, ...] | None:
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
        """Open the annotation tables, converting them first if necessary. Raises DataError."""
        from harness.tasks.image_csv import task

        return task.open_tables(self, seed, cache_dir)

    def open_new(self, learned: dict[str, Any], source: str, cache_dir: Path | None) -> ImageCsv:
        """Open the table ``source`` for prediction. Its labels are optional and are not interpreted."""
        from harness.tasks.image_csv import task

        return task.open_new_table(self, learned, source, cache_dir)
