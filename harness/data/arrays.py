"""Data sets that fit into memory: arrays, mapped from files where they lie in some, so that ranks and workers share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from harness.data.batch import Batch
from harness.errors import DataError


@dataclass(frozen=True)
class Arrays:
    """Row r is ``inputs[r]`` and ``targets[r]``, handed out as they are stored. Rows of one kind: (rows, …)."""

    inputs: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        """The batch of ``rows``, in order; the same in every epoch. Only these rows are copied."""
        inputs, targets = np.asarray(self.inputs[rows]), np.asarray(self.targets[rows])
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), rows, [])


def map_idx(path: Path, num_dims: int, how_to_get: str) -> np.ndarray:
    """The bytes of an IDX file, mapped read-only. Raises DataError where it is none, or not whole.

    The format: two zero bytes, the type of the numbers (8: unsigned bytes), the number of dimensions, then each
    dimension as a big-endian 32-bit number, then the numbers (http://yann.lecun.com/exdb/mnist).
    """
    try:
        with open(path, "rb") as stream:
            header = stream.read(4 + 4 * num_dims)
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError("the data are not here", where=str(path), hint=how_to_get) from None
    except OSError as error:
        raise DataError(f"it cannot be read: {error.strerror}", where=str(path), hint=how_to_get) from None
    shape = tuple(int(number) for number in np.frombuffer(header[4:], dtype=">u4")) if len(header) % 4 == 0 else ()
    if header[:4] != bytes([0, 0, 8, num_dims]) or len(shape) != num_dims:
        raise DataError(f"this is no IDX file of bytes in {num_dims} dimensions", where=str(path), hint=how_to_get)
    if size != len(header) + math.prod(shape):
        expected = len(header) + math.prod(shape)
        raise DataError(f"it is broken: {size} bytes instead of {expected}", where=str(path), hint=how_to_get)
    return np.memmap(path, dtype=np.uint8, mode="r", offset=len(header), shape=shape)
