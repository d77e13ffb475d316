"""Data, model, loss and metrics of the tasks ``mnist`` and ``fashion_mnist``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.config.transforms import TransformsSection
from harness.data import transforms, vision
from harness.data.arrays import ImageArrays, map_idx
from harness.errors import DataError
from harness.tasks.mnist.config import Task
from harness.training.task import Arrays, Classification, ModelSection, model_builder


def open_data(task: Task, seed: int, cache_dir: Path | None) -> Images:
    """Map the images in ``task.root``. Raises HarnessError."""
    datasets = vision.torchvision("datasets")
    names = getattr(datasets, task.kind).classes  # MNIST's are "0 - zero"
    classes = tuple(name.split(" - ")[0] for name in names)
    train, evaluated = _rows(task, "train", task.train_rows), _rows(task, "t10k", task.eval_rows)
    if task.transforms != TransformsSection():
        lists = transforms.build(task.transforms, tuple(train.inputs.shape[2:]), 1)
        train, evaluated = (ImageArrays(rows.inputs, rows.targets, *lists, seed) for rows in (train, evaluated))
        first = train.batch(np.zeros(1, np.int64), 0).inputs[0], evaluated.batch(np.zeros(1, np.int64), None).inputs[0]
        transforms.require_match(*first, task.transforms)
    images = Images(task, train, evaluated, classes)
    images.objective.check(len(images.eval))
    return images


def _rows(task: Task, split: str, num_rows: int | None) -> Arrays:
    raw = Path(task.root) / task.kind / "raw"
    hint = f"type: harness data {task.name} {shlex.quote(task.root)}"
    images, file = map_idx(raw / f"{split}-images-idx3-ubyte", 3, hint), raw / f"{split}-labels-idx1-ubyte"
    labels = map_idx(file, 1, hint)
    if len(images) != len(labels):
        raise DataError(f"{len(labels):,} labels for {len(images):,} images", where=str(file), hint=hint)
    if labels.max(initial=0) > 9:
        raise DataError(f"a label is {labels.max()}; labels are 0 to 9", where=str(file), hint=hint)
    return Arrays(images[:num_rows, None], labels[:num_rows].astype(np.int64))


@dataclass(frozen=True)
class Images(Classification):
    """The opened task. Images are uint8 (rows, 1, height, width)."""

    options: Task
    train: Arrays
    eval: Arrays
    classes: tuple[str, ...]

    def model(self, section: ModelSection) -> nn.Module:
        outputs, example = len(self.classes), torch.zeros(2, *self.train.inputs.shape[1:])
        arguments = {"num_classes": outputs, "in_channels": 1}
        return model_builder.build(section.name, section.args, arguments, example, outputs, self.options)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return uint8 (batch, 1, height, width) as normalized float32; float32 as it is."""
        if inputs.is_floating_point():
            return inputs
        return inputs.float().div_(255).sub_(self.options.mean).div_(self.options.std)

    def known(self, rows: np.ndarray) -> dict[str, list[Any]]:
        return {"id": rows.tolist(), "label": [self.classes[code] for code in self.eval.targets[rows].tolist()]}

    @property
    def signature(self) -> dict[str, Any]:
        first = self.eval.batch(np.zeros(1, np.int64), None).inputs[0]
        description = transforms.describe(self.options.transforms, first, [self.options.mean], [self.options.std])
        return {"input": "images", **self.objective.labels.signature, "preprocessing": {"color": "gray", **description}}
