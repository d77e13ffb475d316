"""Image classification from an annotation CSV: a column of image paths and a column of labels."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.nn import functional
from torchvision.io import ImageReadMode
from torchvision.transforms import v2

from harness import metrics, models
from harness.config import ModelSection, TaskSection
from harness.data.images import ImageTable
from harness.data.table import Table, open_table
from harness.errors import DataError
from harness.section import Fraction, Section

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
        tables = {
            split: open_table(source, text=(self.path_column,), label=self.label_column, cache_dir=cache_dir)
            for split, source in (("train", self.train_csv), ("eval", self.eval_csv))
        }
        classes = tables["train"].vocabulary
        codes = {label: index for index, label in enumerate(classes)}
        unknown = [label for label in tables["eval"].vocabulary if label not in codes]
        if unknown:
            raise _unknown_label(tables["eval"], self.train_csv, unknown, classes)

        train, eval_ = (
            self._images(table, [codes[label] for label in table.vocabulary], seed) for table in tables.values()
        )
        return ImageCsv(self, train, eval_, classes)

    def open_new(self, learned: dict[str, Any], source: str, cache_dir: Path | None) -> ImageCsv:
        """The table ``source`` to guess the classes of; labels are taken as they are written, if there are any."""
        table = open_table(source, text=(self.path_column,), cache_dir=cache_dir)
        images = self._images(table, [], seed=0)
        return ImageCsv(self, images, images, tuple(learned["classes"]), tuple(learned["image_size"]))

    def _images(self, table: Table, codes: Sequence[int], seed: int) -> ImageTable:
        """The images of ``table``, of whose label codes ``codes`` are the class indices."""
        return ImageTable(
            table=table,
            root=Path(self.root),
            path_column=self.path_column,
            targets=np.asarray(codes, dtype=np.int64),
            seed=seed,
            mode=ImageReadMode.RGB if self.color == "rgb" else ImageReadMode.GRAY,
            augment=_pipeline(self.augment, self.image_size),
            resize=_pipeline(None, self.image_size),
            on_bad_image=self.on_bad_image,
        )


@dataclass(frozen=True)
class ImageCsv:
    """The opened task: data, model, loss and metrics. ``classes[index]`` is the label of a class index.

    ``known_size`` is the (height, width) of images where it was learned from other data than these.
    """

    options: Task
    train: ImageTable
    eval: ImageTable
    classes: tuple[str | int, ...]
    known_size: tuple[int, ...] | None = None

    @property
    def summary(self) -> dict[str, Any]:
        return {"train rows": len(self.train), "eval rows": len(self.eval), "classes": len(self.classes)}

    @property
    def notes(self) -> list[str]:
        """What is odd about the annotations, though it can be used."""
        return [*self.train.table.notes, *self.eval.table.notes]

    @property
    def fingerprint(self) -> str:
        """The same on two nodes if and only if they read the same annotations."""
        return f"{self.train.table.digest} {self.eval.table.digest}"

    def label_counts(self, start: int, stop: int) -> np.ndarray:
        """Training rows of each class among rows [start, stop)."""
        counts = np.zeros(len(self.classes), dtype=np.int64)
        for edge in range(start, stop, 1 << 20):
            codes = self.train.table.labels(np.arange(edge, min(edge + (1 << 20), stop)))
            counts += np.bincount(self.train.targets[codes], minlength=len(self.classes))
        return counts

    @cached_property
    def image_size(self) -> tuple[int, ...]:
        """(height, width) as the model sees it: as set, else that of the first training image that can be read."""
        known = self.options.image_size or self.known_size
        return known or tuple(self.train.batch(np.arange(1), epoch=0).inputs.shape[-2:])

    @property
    def learned(self) -> dict[str, Any]:
        return {"classes": list(self.classes), "image_size": list(self.image_size)}

    def model(self, section: ModelSection) -> nn.Module:
        example = torch.zeros(2, self.options.channels, *self.image_size)
        known = {"num_classes": len(self.classes), "in_channels": self.options.channels}
        return models.build(section.name, section.args, known, example)

    def prepare(self, inputs: Tensor) -> Tensor:
        """uint8 (batch, channels, height, width) -> float32, normalised, on the same device."""
        mean, std = (
            _per_channel(v, self.options.channels, inputs.device) for v in (self.options.mean, self.options.std)
        )
        return inputs.float().div_(255).sub_(mean).div_(std)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of logits (batch, classes)."""
        return functional.cross_entropy(outputs, targets, label_smoothing=self.options.label_smoothing)

    def evaluate(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return metrics.classification(outputs, targets, len(self.classes))

    def report(self, sums: metrics.Sums) -> metrics.Report:
        return metrics.classification_report(sums, self.classes)

    def predictions(self, outputs: Tensor) -> dict[str, Any]:
        return metrics.classification_table(outputs, self.classes)

    def known(self, rows: np.ndarray) -> dict[str, list[Any]]:
        """Path and label of rows to evaluate."""
        table, label = self.eval.table, self.options.label_column
        found: dict[str, list[Any]] = {"id": table.strings(self.options.path_column, rows)}
        if table.label is not None:
            found["truth"] = [table.vocabulary[code] for code in table.labels(rows).tolist()]
        elif label in table.columns:
            found["truth"] = table.strings(label, rows)
        return found

    @property
    def signature(self) -> dict[str, Any]:
        """What a user of an exported model must know."""
        mean, std = (list(v or [0.5] * self.options.channels) for v in (self.options.mean, self.options.std))
        return {
            "input": "images",
            "output": "logits",
            "classes": list(self.classes),
            "preprocessing": {
                "color": self.options.color,
                "size": list(self.image_size),
                "resize": "bilinear with antialiasing" if self.options.image_size else "none: images have this size",
                "scale": "pixels from 0 to 255 are divided by 255, then mean is subtracted, then divided by std",
                "mean": mean,
                "std": std,
            },
        }


@lru_cache  # made once: a new tensor on a GPU is a copy that the host waits for
def _per_channel(values: tuple[float, ...] | None, channels: int, device: torch.device) -> Tensor:
    return torch.tensor(values or [0.5] * channels, device=device).view(-1, 1, 1)


def _pipeline(augment: Augment | None, size: tuple[int, int] | None) -> v2.Transform:
    """uint8 image -> uint8 image."""
    steps: list[v2.Transform] = []
    if augment and augment.random_resized_crop and size:
        steps.append(v2.RandomResizedCrop(size, antialias=True))
    elif size:
        steps.append(v2.Resize(size, antialias=True))
    if augment and augment.rotation:
        steps.append(v2.RandomRotation(augment.rotation, interpolation=v2.InterpolationMode.BILINEAR))
    if augment and augment.crop_padding:
        steps.append(_Shift(augment.crop_padding))
    if augment and augment.horizontal_flip:
        steps.append(v2.RandomHorizontalFlip(augment.horizontal_flip))
    return v2.Compose(steps) if steps else v2.Identity()


class _Shift(v2.Transform):
    """Move the image by up to ``pixels`` in each direction, filling with zeros."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.pixels = pixels

    def forward(self, image: Tensor) -> Tensor:
        padded = functional.pad(image, [self.pixels] * 4)
        top, left = torch.randint(0, 2 * self.pixels + 1, (2,)).tolist()
        return padded[..., top : top + image.shape[-2], left : left + image.shape[-1]]


def _unknown_label(table: Table, train_csv: str, unknown: list[Any], classes: tuple[Any, ...]) -> DataError:
    near = difflib.get_close_matches(str(unknown[0]), [str(label) for label in classes], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "evaluate on labels that are trained, or correct the CSV"
    labels = ", ".join(repr(label) for label in unknown[:5])
    code = table.vocabulary.index(unknown[0])
    row = next(row for row in range(len(table)) if table.labels(np.asarray([row]))[0] == code)
    return DataError(
        f"{len(unknown)} label(s) that {train_csv} does not have: {labels}", where=table.where(row), hint=hint
    )
