"""The interface between a dataset and the loader: a dataset returns a ``Batch`` for the rows it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch


@dataclass
class Batch:
    """Rows as a dataset returns them and the loader delivers them.

    inputs: (batch, ...) as the dataset stores them
    targets: (batch, ...), usually int64 (batch,)
    rows: (batch,) numbers of the rows that are really in the batch
    bad: numbers of the requested rows that could not be read
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    rows: np.ndarray
    bad: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.targets)

    def pin_memory(self) -> Batch:
        return Batch(self.inputs.pin_memory(), self.targets.pin_memory(), self.rows, self.bad)

    def to(self, device: torch.device) -> Batch:
        """Copy inputs and targets to ``device``; the copy is asynchronous if they are in pinned memory."""
        if device.type == "cpu":
            return self
        return Batch(
            self.inputs.to(device, non_blocking=True), self.targets.to(device, non_blocking=True), self.rows, self.bad
        )


class Dataset(Protocol):
    """All rows of a split. Which rank reads which rows, and in which order, is decided by the caller."""

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        """Return the rows numbered ``rows`` (int64), in that order.

        ``epoch`` is None in evaluation. Random augmentation must depend on (seed, epoch, row) alone, because a resumed
        run and a run on other ranks ask for the same rows in other batches: see ``harness.data.seeds.row_seed``.
        """
        ...
