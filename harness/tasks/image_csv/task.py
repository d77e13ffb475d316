"""Data, model, loss and metrics of the task ``image_csv``."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from harness.config.places import is_url
from harness.data import transforms
from harness.data.image_checks import Copy, ImageChecks, copies, in_order
from harness.data.image_files import ImageFiles
from harness.data.images import ImageTable
from harness.data.row_labels import NoLabels
from harness.data.row_order import spread
from harness.data.shards import bounds
from harness.data.table.table import open_table
from harness.errors import ConfigError, DataError, plural
from harness.tasks.image_csv.config import Task
from harness.training.evaluation.objective import Objective
from harness.training.evaluation.tables import Split, label_problems, open_new_table, open_tables
from harness.training.task import ModelSection, Supervised, model_builder

_COMPARED_ROWS = 2_000_000  # in tables whose paths are compared, which takes up to a few seconds
_COMPARING_S = 3.0  # of the content of images, those of validation first
_NAMED = 3  # copies in a warning
_AT_START = 16  # images that each rank decodes of each split before training, and more of validation if time is left
_SAMPLE = 200  # images of each split that harness check decodes first, evenly spread
_DECODING_S = 5.0  # for as many others as this allows
Found = TypeVar("Found")


def open_data(task: Task, seed: int, cache_dir: Path | None) -> ImageCsv:
    """Open ``task.train_csv`` and ``task.eval_csv``. Raises HarnessError."""
    lists = _pipelines(task)  # before tables are converted
    *splits, opened = open_tables(task, cache_dir)
    train, eval_ = (_images(task, split, lists, seed, cache_dir) for split in splits)
    return ImageCsv(task, train, eval_, opened)


def open_new(task: Task, learned: dict[str, Any], source: str, cache_dir: Path | None) -> ImageCsv:
    """Open the table ``source`` for prediction with the labels and image size in ``learned``."""
    lists = _pipelines(task)
    split, opened = open_new_table(task, learned, source, cache_dir)
    images = replace(_images(task, split, lists, 0, cache_dir), is_new=True)
    return ImageCsv(task, images, images, opened, _learned_size(learned))


def row_problems(task: Task) -> Iterator[DataError]:
    """Yield the problems of the rows of both tables, an error for each kind and table."""
    with tempfile.TemporaryDirectory(prefix="harness-") as cache:  # for the tables without their labels
        tables = []
        for source in (task.train_csv, task.eval_csv):
            try:
                tables.append(open_table(source, text=task.columns, cache_dir=Path(cache)))
            except DataError as error:
                yield error
        if len(tables) < 2:
            return
        yield from label_problems(task, *tables)
        for table in tables if task.on_bad_row == "stop" and not is_url(task.root) else ():
            split = Split(table, NoLabels(table, ()))
            images = _images(task, split, _pipelines(task), 0, Path(cache))
            yield from ImageChecks(images).problems(2 * _DECODING_S)


def _pipelines(task: Task) -> tuple[transforms.Pipeline, transforms.Pipeline]:
    """Return the transforms for training and evaluation. Raises ConfigError."""
    lists = transforms.build(task.transforms, task.image_size, task.channels)
    if task.decode == "reduced" and not any(pipeline.scales_first for pipeline in lists):
        raise ConfigError(
            "no image can be decoded at a reduced size, because neither list of transforms starts by scaling the image",
            where="task.decode",
            hint="start the lists with RandomResizedCrop or Resize, or remove them and set task.image_size; "
            "or set task.decode=full",
        )
    return lists


def _learned_size(facts: dict[str, Any]) -> tuple[int, ...]:
    """Return the image size in ``facts``, the content of task.json. Raises ConfigError."""
    size = facts["image_size"] if isinstance(facts.get("image_size"), list) else []
    if not (len(size) == 2 and all(type(side) is int and side > 0 for side in size)):
        raise ConfigError(
            "the run's task.json lacks a valid image size of the training data",
            hint="start the run again to write the file: harness train -c RUN/config.yaml",
        )
    return tuple(size)


def _images(
    task: Task,
    split: Split,
    lists: tuple[transforms.Pipeline, transforms.Pipeline],
    seed: int,
    cache_dir: Path | None,
) -> ImageTable:
    return ImageTable(
        table=split.table,
        files=ImageFiles(task.root, cache_dir, task.cache_gib),
        path_column=task.path_column,
        labels=split.labels,
        seed=seed,
        channels=task.channels,
        for_training=lists[0],
        for_evaluation=lists[1],
        on_bad_row=task.on_bad_row,
        reduced=task.decode == "reduced",
    )


@dataclass(frozen=True)
class ImageCsv(Supervised):
    """The opened task. ``learned_size``: (height, width) of the training images, for a task opened on new data."""

    options: Task
    train: ImageTable
    eval: ImageTable
    objective: Objective
    learned_size: tuple[int, ...] | None = None

    @property
    def notes(self) -> list[str]:
        of_tables = *self.train.table.notes, *self.eval.table.notes
        return [*of_tables, *self.objective.notes, *self._in_both(), *self._copies()]

    def _in_both(self) -> Iterator[str]:
        """Yield a warning if the training table has images of validation, whose metrics are then too good."""
        column, tables = self.options.path_column, (self.train.table, self.eval.table)
        if self.train is self.eval or max(map(len, tables)) > _COMPARED_ROWS:
            return
        paths, validation = (table.slice(column, 0, len(table)) for table in tables)
        images = validation.filter(pc.not_equal(pc.utf8_trim_whitespace(validation), ""))
        rows = np.flatnonzero(pc.is_in(paths, value_set=images).to_numpy())
        if len(rows):
            subject = f"{plural(len(rows), 'training row')} {'has an image' if len(rows) == 1 else 'have images'}"
            yield (
                f"{tables[0].where(int(rows[0]))}: {subject} that {self.options.eval_csv} has too; the metrics of "
                "validation will be too good"
            )

    def _copies(self) -> Iterator[str]:
        """Yield a warning if images of validation are copies of those of training, and one if copies differ in their
        labels."""
        if self.train is self.eval:
            return
        found, num_rows = copies([self.eval, self.train], _COMPARING_S)
        total = len(self.eval) + len(self.train)
        compared = "" if num_rows == total else f" (compared: {num_rows:,} of {plural(total, 'row')})"

        def named(some: list[Copy]) -> str:
            pairs = (" and ".join(images.row_name(row) for images, row in each[:2]) for each in some[:_NAMED])
            more = f" and {len(some) - _NAMED:,} more" if len(some) > _NAMED else ""
            return f"{', '.join(pairs)}{more}{compared}"

        def label(images: ImageTable, row: int) -> list[float]:
            values: list[float] = images.labels.targets(np.array([row])).tolist()
            return values

        in_both = [each for each in found if each.is_renamed and each.original[0] is not each.row[0]]
        if in_both:
            yield (
                f"{plural(len(in_both), 'training row')} with a copy of an image of {self.options.eval_csv}: "
                f"{named(in_both)}; the metrics of validation will be too good: remove the rows from one of the tables"
            )
        is_class = self.label_counts(0, 0) is not None  # different numbers may be measurements
        if differing := [each for each in found if is_class and label(*each.original) != label(*each.row)]:
            yield (
                f"{plural(len(differing), 'row')} with the image of a row that has another label: {named(differing)}; "
                "correct the labels, or remove the rows"
            )

    @property
    def fingerprint(self) -> str:
        return f"{self.train.table.digest} {self.eval.table.digest}"

    def require_files(self, rank: int, world_size: int, limit_s: float) -> None:
        if self.options.image_size:
            self._require_memory(self.options.image_size)

        until = time.monotonic() + limit_s

        def rows(images: ImageTable) -> np.ndarray:
            return np.arange(*bounds(len(images), rank, world_size))

        def decode(images: ImageTable, epoch: int | None) -> None:
            first = spread(rows(images), _AT_START) if epoch == 0 else in_order(rows(images), _AT_START)
            ImageChecks(images).sample(first, epoch, (until - time.monotonic()) / 2)

        self._of_both(lambda images, _: ImageChecks(images).require_files(rows(images), limit_s / 2))
        if self.options.on_bad_row == "stop":
            try:
                self._of_both(decode)
            except DataError:
                self.sample(limit_s)  # names the others
                raise

    def look(self, rows: range, ended: Callable[[], bool]) -> None:
        if self.options.on_bad_row == "stop":
            ImageChecks(self.eval).require_decodable(rows, ended)

    def copy_files(self, train: range, evaluated: range, rank: int) -> None:
        archives = self.train.archives(train.start, train.stop) | self.eval.archives(evaluated.start, evaluated.stop)
        order = sorted(archives)
        random.Random(rank).shuffle(order)  # or all ranks would wait for the same one
        self.train.files.copy_archives(order)

    def sample(self, limit_s: float) -> str:
        def decode(images: ImageTable, epoch: int | None) -> str:
            order = in_order(np.arange(len(images)), _SAMPLE)
            return ImageChecks(images).sample(order, epoch, min(limit_s, _DECODING_S) / 2)

        return "; ".join(f"{split}: {text}" for split, text in self._of_both(decode).items())

    def _of_both(self, look: Callable[[ImageTable, int | None], Found]) -> dict[str, Found]:
        """Return the results of ``look`` for each split, or for new rows, which are both, as for validation. Raises one
        DataError for the errors of both."""
        results: dict[str, Found] = {}
        errors = []
        splits = ("training", self.train, 0), ("validation", self.eval, None)
        for split, images, epoch in splits[self.train is self.eval :]:
            try:
                results[split] = look(images, epoch)
            except DataError as error:
                errors.append(error)
        if errors and errors[0].where != errors[-1].where:
            first, second = errors
            message = f"{first.message}; in the validation data, {second.where}: {second.message}"
            raise DataError(message, where=first.where, hint=first.hint)
        if errors:
            raise errors[0]
        return results

    def label_counts(self, start: int, stop: int) -> np.ndarray | None:
        return self.train.labels.counts(start, stop)

    @cached_property
    def image_size(self) -> tuple[int, ...]:
        """(height, width) of the images that the model evaluates."""
        return self.options.image_size or self.learned_size or tuple(self._first[1].shape[-2:])

    @cached_property
    def _first(self) -> tuple[Tensor, Tensor]:
        """The first readable image of training and of evaluation, transformed. Raises ConfigError if they do not
        match."""
        evaluated = replace(self.eval, for_training=self.eval.for_evaluation)  # as one that finds a readable image
        train, eval_ = (images.batch(np.arange(1), epoch=0).inputs[0] for images in (self.train, evaluated))
        transforms.require_match(train, eval_, self.options.transforms)
        if train.is_floating_point() and (self.options.mean or self.options.std):
            raise ConfigError(
                "the transforms return floats, to which task.mean and task.std are not applied",
                where="task.mean" if self.options.mean else "task.std",
                hint="remove task.mean and task.std, or remove ToDtype and Normalize from the end of both lists",
            )
        return train, eval_

    @property
    def learned(self) -> dict[str, Any]:
        return {**self.objective.labels.learned, "image_size": list(self.image_size)}

    def model(self, section: ModelSection) -> nn.Module:
        outputs, example = len(self.objective.labels.names), self._example(self.image_size)
        arguments = {"num_classes": outputs, "in_channels": self.options.channels}
        model = model_builder.build(section.name, section.args, arguments, example, outputs, self.options)
        if self.learned_size is None and self._first[0].shape != self._first[1].shape:
            model_builder.try_batch(
                model, section.name, self._example(self._first[0].shape[-2:]), outputs, self.options
            )
        return model

    def _example(self, size: Sequence[int]) -> Tensor:
        """Return a prepared batch of two images. Raises ConfigError if they do not fit into memory."""
        self._require_memory(size)
        return torch.zeros(2, self.options.channels, *size)

    def _require_memory(self, size: Sequence[int]) -> None:
        num_bytes = 2 * self.options.channels * math.prod(size) * 4
        model_builder.require_memory(num_bytes, f"two images of {size[0]}x{size[1]}", "task.image_size")

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return uint8 (batch, channels, height, width) as normalized float32; float32 as it is."""
        if inputs.is_floating_point():
            return inputs
        mean, std = (
            _per_channel(v, self.options.channels, inputs.device) for v in (self.options.mean, self.options.std)
        )
        return inputs.float().div_(255).sub_(mean).div_(std)

    def known(self, rows: np.ndarray) -> dict[str, Any]:
        return {"id": self.eval.table.strings(self.options.path_column, rows), **self.eval.labels.known(rows)}

    @property
    def signature(self) -> dict[str, Any]:
        return {
            "input": "images",
            **self.objective.labels.signature,
            "preprocessing": self._preprocessing(),
        }

    def _preprocessing(self) -> dict[str, Any]:
        options, size = self.options, self.learned_size
        mean, std = (list(v or [0.5] * options.channels) for v in (options.mean, options.std))
        if size:
            first = self.eval.for_evaluation(torch.zeros(options.channels, *size, dtype=torch.uint8))
        else:
            first = self._first[1]
        details = transforms.describe(options.transforms, first, mean, std)
        if options.image_size:
            details["resize"] = "the largest centered part with the aspect ratio of size, bilinear with antialiasing"
        if options.decode == "reduced":
            details["decode"] = (
                "JPEGs at 1/2, 1/4 or 1/8 of their size if the first transform scales them down by at least that"
            )
        return {"color": options.color, **details}


@lru_cache  # creating a tensor on a GPU makes the host wait for the copy
def _per_channel(values: tuple[float, ...] | None, channels: int, device: torch.device) -> Tensor:
    return torch.tensor(values or [0.5] * channels, device=device).view(-1, 1, 1)
