"""Datasets in memory: arrays, which may be mapped from files so that ranks and workers share them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from harness.data.batch import Batch
from harness.data.seeds import row_seed, seeded_torch
from harness.errors import DataError, plural, require_regular_file

Transform = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Arrays:
    """A dataset of rows ``inputs[r]`` and ``targets[r]``, both of shape (rows, ...)."""

    inputs: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        """Return a copy of these rows; the same in every epoch."""
        inputs, targets = np.asarray(self.inputs[rows]), np.asarray(self.targets[rows])
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), rows)


@dataclass(frozen=True)
class ImageArrays(Arrays):
    """Images, uint8 (rows, channels, height, width), each transformed as in ``harness.data.transforms``."""

    for_training: Transform
    for_evaluation: Transform
    seed: int

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        plain, images = super().batch(rows, epoch), []
        for row, image in zip(rows.tolist(), plain.inputs, strict=True):
            with nullcontext() if epoch is None else seeded_torch(row_seed(self.seed, epoch, row)):
                images.append((self.for_evaluation if epoch is None else self.for_training)(image))
        return replace(plain, inputs=torch.stack(images))


def map_idx(path: Path, num_dims: int, hint: str) -> np.ndarray:
    """Map the bytes of an IDX file, read-only. Raises DataError, with ``hint``, for a missing or damaged file.

    The format: two zero bytes, the type of the numbers (8: unsigned bytes), the number of dimensions, each dimension
    as a big-endian 32-bit number, then the numbers (http://yann.lecun.com/exdb/mnist).
    """
    try:
        require_regular_file(path)
        with open(path, "rb") as stream:
            header = stream.read(4 + 4 * num_dims)
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError("the file does not exist", where=str(path), hint=hint) from None
    except OSError as error:
        raise DataError(f"the file cannot be read: {error.strerror}", where=str(path), hint=hint) from None
    shape = tuple(int(number) for number in np.frombuffer(header[4:], dtype=">u4")) if len(header) % 4 == 0 else ()
    if header[:4] != bytes([0, 0, 8, num_dims]) or len(shape) != num_dims:
        raise DataError(
            f"this is not an IDX file of bytes with {plural(num_dims, 'dimension')}", where=str(path), hint=hint
        )
    expected = len(header) + math.prod(shape)
    if size != expected:
        raise DataError(f"the file is damaged: {size} bytes instead of {expected}", where=str(path), hint=hint)
    return np.memmap(path, dtype=np.uint8, mode="r", offset=len(header), shape=shape)
