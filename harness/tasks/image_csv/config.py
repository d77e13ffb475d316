"""Images from an annotation CSV: one column of image paths, and one of labels or several of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from harness.config.base import Mark, NullIsEmpty
from harness.config.targets import TableTask
from harness.config.transforms import TransformsSection
from harness.errors import plural

if TYPE_CHECKING:
    from harness.errors import DataError

_CHANNELS = {"rgb": 3, "gray": 1}


def _require_two_sides(value: Any) -> Any:
    sides = [value] if type(value) is int else value
    if isinstance(sides, list | tuple) and len(sides) != 2:
        message = f"it should be a list of two numbers, [height, width] (found: {value})"
        raise ValueError(message + (f": use task.image_size=[{sides[0]},{sides[0]}]" if len(sides) == 1 else ""))
    return value


Side = Annotated[int, Field(ge=1, le=2**16)]  # pixels


class Task(TableTask):
    """A CSV (or Parquet file) with one image path and a label, several labels or numbers per row."""

    name: Literal["image_csv"]
    """Predicts labels or numbers for the images that an annotation CSV names."""
    root: Annotated[str, Mark.OF_MACHINE] = ""
    """Folder, such as photos, or fsspec URL (s3://bucket/images) that image paths are relative to; empty: the working
    directory.
    """
    cache_gib: Annotated[float, Field(gt=0), Mark.NO_RECIPE, Mark.OF_MACHINE] = 50.0
    """Maximum size, in GiB, of the copies of files behind URLs in data.cache_dir on this machine."""
    path_column: str = "path"
    """Column of the CSV with the paths of the images."""
    image_size: Annotated[tuple[Side, Side] | None, BeforeValidator(_require_two_sides)] = Field(
        default=None, strict=False
    )
    """[height, width] of the images that the model gets, such as [224, 224]. An image that still has a different size
    after `transforms` is center-cropped to this aspect ratio and scaled; null: all images have the same size already.
    """
    transforms: Annotated[TransformsSection, NullIsEmpty] = TransformsSection()
    """Transforms of each image, as lists of torchvision.transforms.v2 classes (docs/augmentation.md)."""
    color: Literal["rgb", "gray"] = "rgb"
    """Channels that images are converted to: three (rgb) or one (gray)."""
    mean: tuple[float, ...] | None = Field(default=None, strict=False)
    """One value per channel, such as [0.485, 0.456, 0.406], subtracted from pixels scaled to [0, 1]; null: 0.5. Not for
    transforms that return floats, which must normalize images themselves.
    """
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(default=None, strict=False)
    """One value per channel, such as [0.229, 0.224, 0.225], that pixels are then divided by; null: 0.5."""
    decode: Literal["full", "reduced"] = "full"
    """reduced: a JPEG is decoded at 1/2, 1/4 or 1/8 of its size where the first transform scales it down by at least as
    much, which is several times faster for large photos. Pixels differ slightly from those of full.
    """
    on_bad_row: Literal["stop", "skip"] = "stop"
    """A missing or corrupt image ends the run (stop), or is counted (skip): in training, the next readable row replaces
    it; an evaluation leaves it out. A row without a label is not skipped: it is an error before training.
    """

    @field_validator("mean", "std")
    @classmethod
    def _one_value_per_channel(cls, values: tuple[float, ...] | None, info: ValidationInfo) -> tuple[float, ...] | None:
        channels = _CHANNELS.get(info.data.get("color", ""))
        if values is not None and channels is not None and len(values) != channels:
            raise ValueError(
                f"{plural(len(values), 'value')}, but task.color={info.data['color']} has {plural(channels, 'channel')}"
            )
        return values

    @property
    def input_columns(self) -> dict[str, str]:
        return {self.path_column: "task.path_column"}

    @property
    def channels(self) -> int:
        return _CHANNELS[self.color]

    def problems(self) -> Iterator[DataError]:
        from harness.data.table import header

        yield from header.problems((self.train_csv, self.eval_csv), self.columns, self.root)

    def row_problems(self) -> Iterator[DataError]:
        yield from self.beside().row_problems(self)
