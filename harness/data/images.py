"""Images named by an annotation table: read, decoded and augmented row by row, handed out batch by batch as uint8.

A row's augmentation is drawn from (seed, epoch, row): it does not depend on the loader worker, the rank or the order,
so a resumed run sees the same pixels. Normalisation is left to the device, once a batch.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torchvision.io import ImageReadMode, decode_image, read_file
from torchvision.transforms.v2 import functional

from harness.data.batch import Batch
from harness.data.seeds import row_seed, seeded_torch
from harness.data.table.table import Table
from harness.errors import DataError, first_line

NUM_TRIES = 100  # readable rows looked for in place of an unreadable one
MAX_NAMES = 10_000  # of a folder, among which the nearest is looked for
_UNREADABLE = (RuntimeError, OSError)  # what torchvision and the file system raise


@dataclass
class ImageTable:
    """The images and labels of a table.

    ``targets[code]`` is the class index of the table's label code. ``augment`` is applied to each training image,
    ``resize`` to each evaluation image: uint8 (channels, height, width) in and out. ``on_bad_image`` says whether an
    unreadable file is an error or is replaced by the next readable row (left out, in evaluation).
    """

    table: Table
    root: Path
    path_column: str
    targets: np.ndarray
    seed: int
    mode: ImageReadMode
    augment: Callable[[torch.Tensor], torch.Tensor]
    resize: Callable[[torch.Tensor], torch.Tensor]
    on_bad_image: str = "error"

    def __len__(self) -> int:
        return self.table.num_rows

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        """The batch of ``rows``, in order; augmented as in ``epoch``, or plain for evaluation where that is None."""
        images, used, bad = [], [], []
        paths = self.table.strings(self.path_column, rows)
        for row, path in zip(rows.tolist(), paths, strict=True):
            try:
                image = self._decoded(path)
            except _UNREADABLE as error:
                if self.on_bad_image == "error":
                    raise self._unreadable(row, path, error) from None
                bad.append(row)
                if epoch is None:
                    continue
                row, image = self._replacement(row)
            images.append(self._transformed(image, row, epoch))
            used.append(row)
        numbers = np.asarray(used, dtype=np.int64)
        return Batch(self._stack(images, used), torch.from_numpy(self._targets(numbers)), numbers, bad)

    def _targets(self, rows: np.ndarray) -> np.ndarray:
        """Class indices; -1 in a table without labels."""
        if self.table.label is None:
            return np.full(len(rows), -1, np.int64)
        return self.targets[self.table.labels(rows)]

    def _decoded(self, path: str) -> torch.Tensor:
        """The image at ``path``, uint8 (channels, height, width). Raises one of _UNREADABLE."""
        return _as_asked(decode_image(read_file(os.path.join(self.root, path)), mode=self.mode), self.mode)

    def _transformed(self, image: torch.Tensor, row: int, epoch: int | None) -> torch.Tensor:
        if epoch is None:
            return self.resize(image)
        with seeded_torch(row_seed(self.seed, epoch, row)):
            return self.augment(image)

    def _replacement(self, row: int) -> tuple[int, torch.Tensor]:
        """The next readable row after ``row``, cyclically, and its image: every rank keeps its number of rows."""
        for candidate in range(row + 1, row + 1 + min(NUM_TRIES, len(self) - 1)):
            number = candidate % len(self)
            path = self.table.strings(self.path_column, np.asarray([number]))[0]
            with contextlib.suppress(*_UNREADABLE):
                return number, self._decoded(path)
        raise DataError(
            f"its image cannot be read, nor that of any of the {NUM_TRIES} rows after it",
            where=self.table.where(row),
            hint="check task.root: paths in the CSV are relative to it",
        )

    def _unreadable(self, row: int, path: str, error: Exception) -> DataError:
        """Names the CSV's line and the file. Finding the line reads the CSV: not for rows that are passed over."""
        file, where = os.path.join(self.root, path), self.table.where(row)
        if not os.path.exists(file):
            folder, name = os.path.split(file)
            there = os.listdir(folder)[:MAX_NAMES] if os.path.isdir(folder) else []
            names = {other.lower(): other for other in there}  # .JPG is not .jpg, and often the reason
            near = difflib.get_close_matches(name.lower(), names, n=1)
            hint = (
                f"the nearest name there is {names[near[0]]}"
                if near
                else "check task.root: paths in the CSV are relative to it"
            )
            return DataError(
                f"image not found: {file}", where=where, hint=hint + "; task.on_bad_image=skip goes on without it"
            )
        reason = re.sub(r"^\S+, \S+:\d+, ", "", first_line(error))  # where in torchvision's source it was found
        return DataError(
            f"image cannot be decoded: {file}: {reason}",
            where=where,
            hint="replace the file, or set task.on_bad_image=skip to count such rows and go on without them",
        )

    def _stack(self, images: list[torch.Tensor], rows: list[int]) -> torch.Tensor:
        if not images:
            return torch.empty(0, dtype=torch.uint8)
        shape = images[0].shape
        for row, image in zip(rows, images, strict=True):
            if image.shape != shape:
                raise DataError(
                    f"images differ in size: {tuple(shape[1:])} and {tuple(image.shape[1:])} (height, width)",
                    where=self.table.where(row),
                    hint="set task.image_size=[height,width]",
                )
        return torch.stack(images)


def _as_asked(image: torch.Tensor, mode: ImageReadMode) -> torch.Tensor:
    """uint8 with the channels of ``mode``, which torchvision does not heed for 16-bit PNG, WebP and GIF."""
    if image.dim() != 3:
        raise RuntimeError(f"an animation of {len(image)} frames, not one image")
    if image.dtype != torch.uint8:
        image = functional.to_dtype(image, torch.uint8, scale=True)
    return functional.rgb_to_grayscale(image) if mode is ImageReadMode.GRAY and len(image) == 3 else image
