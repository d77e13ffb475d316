"""The dataset of images that an annotation table names: read, decoded and transformed, in batches.

The augmentation of a row depends on (seed, epoch, row), not on the worker, the rank or the order, so a resumed run gets
the same pixels. uint8 images are normalized on the device, per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from harness.config.places import is_url
from harness.data import reduced_jpeg, vision
from harness.data.batch import Batch, StageClock
from harness.data.image_errors import UNREADABLE, ImageErrors
from harness.data.image_files import ImageFiles
from harness.data.row_labels import RowLabels
from harness.data.seeds import EVALUATION_SEED, row_seed, seeded_torch
from harness.data.table.table import Table, TableRows
from harness.data.transforms import Pipeline
from harness.errors import ConfigError, DataError, first_line

NUM_TRIES = 100  # rows tried as a replacement for an unreadable one
_CHUNK_ROWS = 1 << 16  # paths in memory at once, as a view of the table

Transform = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class ImageTable(TableRows):
    """The images and labels of a table, as a dataset."""

    table: Table
    files: ImageFiles
    """Where the images are."""
    path_column: str
    labels: RowLabels
    seed: int
    channels: int
    """vision.RGB or vision.GRAY, to which images are converted."""
    for_training: Transform
    """Applied to each image, uint8 (channels, height, width) -> the same kind, or float32."""
    for_evaluation: Transform
    """The same, in evaluations."""
    on_bad_row: str = "stop"
    """ "stop", or "skip" to replace an unreadable image by the next readable row (omit it in evaluation)."""
    is_new: bool = False
    """True for rows to predict, which have not been trained on."""
    reduced: bool = False
    """True to decode JPEGs at a reduced size where the transforms scale them down; these are then Pipelines."""
    channels_last: bool = False
    """True to deliver batches in this memory format."""

    def __len__(self) -> int:
        return self.table.num_rows

    def row_name(self, row: int, quickly: bool = True) -> str:
        """Return the place of ``row``, with its path."""
        (path,) = self.table.strings(self.path_column, np.array([row]))
        return f"{super().row_name(row, quickly)}: {path}"

    def fault(self, row: int) -> str:
        """Return why the image of ``row`` cannot be read; empty if it can."""
        ((_, path),) = self.paths(np.array([row]))
        try:
            self._loaded(row, path, None, StageClock())
        except (*UNREADABLE, DataError) as error:
            return getattr(error, "strerror", None) or first_line(error)
        return ""

    def row_key(self, row: int) -> str:
        """Return the number of ``row`` with its path: equal on machines that have the table in other places."""
        (path,) = self.table.strings(self.path_column, np.array([row]))
        return f"row {row} (from 0): {path}"

    def paths(self, rows: np.ndarray) -> Iterable[tuple[int, str]]:
        """Return each of ``rows`` with the path of its image."""
        return zip(rows.tolist(), self.table.strings(self.path_column, rows), strict=True)

    @property
    def errors(self) -> ImageErrors:
        return ImageErrors(self.table, self.files, self.path_column, self.is_new)

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        """Return these rows in order, transformed as in training in ``epoch``, or as in evaluation if that is None.
        Raises DataError or, from a transform, ConfigError."""
        images, used_rows, bad, clock = [], [], [], StageClock()
        entries = list(self.paths(rows))
        self.files.read_ahead([path for _, path in entries])
        for row, path in entries:
            clock.start()
            try:
                image, transform = self._loaded(row, path, epoch, clock)
            except UNREADABLE as error:
                if self.on_bad_row == "stop":
                    raise self.errors.unreadable_first(row, path, error) from None
                bad.append(row)
                if epoch is None:
                    continue
                row, image, transform = self._replacement(row, epoch)
            clock.start()
            images.append(transform(image))
            clock.end("transform")
            used_rows.append(row)
        numbers = np.asarray(used_rows, dtype=np.int64)
        targets = torch.from_numpy(self.labels.targets(numbers))
        return Batch(self._stack(images, used_rows), targets, numbers, bad, clock.spent_s)

    def archives(self, start: int, stop: int) -> set[str]:
        """Return the archives behind URLs that rows in [start, stop) name; none if the first row's path is on this
        machine."""
        if start >= stop or not is_url(self.files.locate(self.table.strings(self.path_column, np.array([start]))[0])):
            return set()  # without reading the whole table
        edges = range(start, stop, _CHUNK_ROWS)
        parts = (self.table.slice(self.path_column, edge, min(edge + _CHUNK_ROWS, stop)) for edge in edges)
        return set().union(*map(self.files.archives, parts))

    def _loaded(self, row: int, path: str, epoch: int | None, clock: StageClock) -> tuple[torch.Tensor, Transform]:
        """Return the image, uint8 (channels, height, width), and what is left to do with it. Raises as ``content``,
        and RuntimeError for an image that cannot be decoded."""
        content = self.content(row, path)
        clock.end("read")
        try:
            if self.reduced and (reduced := self._reduced(content, row, epoch)):
                return reduced
            return self.decoded(content), partial(self.transformed, row=row, epoch=epoch)
        finally:
            clock.end("decode")

    def content(self, row: int, path: str) -> torch.Tensor:
        """Return the bytes of ``path``. Raises one of UNREADABLE, or DataError if the archive or the server of the
        file cannot be read."""
        try:
            return self.files.read(path)
        except DataError as error:
            message = f"{error.where}: {error.message}" if error.where else error.message
            raise DataError(message, where=self.table.where(row), hint=error.hint) from None

    def decoded(self, content: torch.Tensor) -> torch.Tensor:
        """Return the image, uint8 (channels, height, width). Raises RuntimeError."""
        return vision.decode_as(content, self.channels)

    def _reduced(self, content: torch.Tensor, row: int, epoch: int | None) -> tuple[torch.Tensor, Transform] | None:
        """Return ``_loaded`` of a JPEG whose first transform scales it down by 2 or more; None for other images."""
        pipeline = self.for_evaluation if epoch is None else self.for_training
        assert isinstance(pipeline, Pipeline)
        file = reduced_jpeg.open_jpeg(content) if pipeline.scales_first else None
        if file is None:
            return None
        with self._seeded(row, epoch):
            region = pipeline.region(*reduced_jpeg.upright_size(file))
            state = torch.get_rng_state()
        if region.factor == 1:
            return None
        image = reduced_jpeg.decode_region(file, region, self.channels)

        def rest(image: torch.Tensor) -> torch.Tensor:
            with seeded_torch(state):
                return pipeline.after_region(image)

        return None if image is None else (image, rest)

    def transformed(self, image: torch.Tensor, row: int, epoch: int | None) -> torch.Tensor:
        if epoch is None:
            return self.for_evaluation(image)
        with self._seeded(row, epoch):
            return self.for_training(image)

    def _seeded(self, row: int, epoch: int | None) -> AbstractContextManager[None]:
        return seeded_torch(EVALUATION_SEED if epoch is None else row_seed(self.seed, epoch, row))

    def _replacement(self, row: int, epoch: int | None) -> tuple[int, torch.Tensor, Transform]:
        """Return the next readable row after ``row``, cyclically, and what ``_loaded`` returns for it, so the batch
        keeps its size."""
        tried, path, failure = min(NUM_TRIES, len(self) - 1), "", None
        for number, path in self.paths(np.arange(row + 1, row + 1 + tried) % len(self)):
            try:
                return number, *self._loaded(number, path, epoch, StageClock())
            except UNREADABLE as error:
                failure = error
        raise self.errors.irreplaceable(row, tried, path, failure)

    def _stack(self, images: list[torch.Tensor], rows: list[int]) -> torch.Tensor:
        """Return the images of ``rows`` as a batch. Raises DataError if they differ in size, ConfigError in type."""
        if not images:
            return torch.empty(0, dtype=torch.uint8)
        shape, kind = images[0].shape, images[0].dtype
        for row, image in zip(rows, images, strict=True):
            if image.dtype != kind:
                raise ConfigError(
                    f"the transforms return {image.dtype} for {self.table.where(row)}, but {kind} for other images",
                    where="task.transforms",
                    hint="return the same type for each",
                )
            if image.shape != shape:
                raise self.errors.differ(row, tuple(shape[1:]), tuple(image.shape[1:]))
        if self.channels_last:
            return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
        return torch.stack(images)
