"""The position of a run, and the rows it has used. All of it is saved in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.data.shards import Segment
from harness.distributed.runtime import Runtime
from harness.training.optimizer.schedule import Plateau


@dataclass
class State:
    """Counters of a run, equal on every rank except ``train_s``. Epochs and steps are those that are finished."""

    epoch: int = 0
    segments: list[Segment] = field(default_factory=list)  # the steps of this epoch so far, by world size
    step: int = 0  # optimizer steps, including skipped ones
    applied: int = 0  # updates that changed the weights; the schedule counts these
    skipped: int = 0
    skipped_in_a_row: int = 0
    epoch_applied: int = 0  # the same within this epoch
    epoch_skipped: int = 0
    rows: int = 0  # training rows over all ranks, including those of skipped steps
    rows_skipped: int = 0  # of these, in skipped steps
    bad_rows: int = 0  # unreadable images, over all ranks
    evaluated: int = 0  # the step of the last evaluation
    best: float | None = None
    best_step: int = 0
    since_best: int = 0  # evaluations
    wall_s: float = 0.0
    train_s: float = 0.0  # the part of it spent in training, on this rank
    history: list[dict[str, float]] = field(default_factory=list)  # one entry per evaluation
    plateau: Plateau = field(default_factory=Plateau)

    def add_step(self, skipped: bool) -> None:
        self.step += 1
        if skipped:
            self.skipped += 1
            self.epoch_skipped += 1
            self.skipped_in_a_row += 1
        else:
            self.applied += 1
            self.epoch_applied += 1
            self.skipped_in_a_row = 0

    def add_best(self, value: float) -> None:
        """Record that the evaluation at this step is the best so far."""
        self.best, self.best_step, self.since_best = value, self.step, 0

    def forget_best(self) -> None:
        """Make the next evaluation the best so far."""
        self.best, self.best_step, self.since_best = None, 0, 0
        self.plateau.forget_best()

    def next_epoch(self) -> None:
        self.epoch, self.segments = self.epoch + 1, []
        self.epoch_applied = self.epoch_skipped = 0

    @property
    def in_epoch(self) -> bool:
        return bool(self.segments)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> State:
        segments = [Segment(**segment) for segment in values["segments"]]
        return cls(**{**values, "segments": segments, "plateau": Plateau(**values["plateau"])})


class Covered(NamedTuple):
    """The rows that an epoch has used over all ranks, from ``Coverage``."""

    used: int  # distinct rows
    repeated: int  # uses beyond the first of each row
    skipped: int  # uses in skipped steps
    missing: list[str]  # up to three rows


class Coverage:
    """Marks the rows that an epoch uses, each rank its own: a byte per row here, a bit in a checkpoint."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._marks = np.zeros(num_rows, dtype=bool)
        self._uses = np.zeros(2, dtype=np.int64)  # all, and those in skipped steps

    def add(self, rows: np.ndarray, skipped: bool = False) -> None:
        """Count the ``rows`` of a step, int64."""
        self._uses += len(rows), len(rows) * skipped
        self._marks[rows] = True

    def reduced(self, runtime: Runtime) -> Tensor:
        """The record of all ranks, as ``load`` takes it: int64 of shape (2 + rows / 64,). Collective."""
        uses = runtime.sum_on_host(torch.from_numpy(self._uses.copy()))
        bits = np.packbits(self._marks)
        words = np.pad(bits, (0, -len(bits) % 8)).view(np.int64)
        return torch.cat([uses, runtime.union_on_host(torch.from_numpy(words))])

    def load(self, reduced: Tensor) -> None:
        """Continue from ``reduced``, on one rank; the others start empty."""
        self._uses[:] = reduced[:2].numpy()
        self._marks[:] = self._unpacked(reduced)

    def covered(self, runtime: Runtime, name: Callable[[int], str] = str) -> Covered:
        """What all ranks have used; ``name`` gives rows their names. Collective."""
        reduced = self.reduced(runtime)
        uses, skipped = reduced[:2].tolist()
        marks = self._unpacked(reduced)
        used, missing = int(marks.sum()), [name(row) for row in np.flatnonzero(~marks)[:3].tolist()]
        return Covered(used, uses - used, skipped, missing)

    def clear(self) -> None:
        """Start the next epoch."""
        self._uses[:] = 0
        self._marks[:] = False

    def _unpacked(self, reduced: Tensor) -> np.ndarray:
        return np.unpackbits(reduced[2:].numpy().view(np.uint8), count=self.num_rows).view(bool)


class Used(NamedTuple):
    """What a step used on this process, for each of its ranks."""

    rows: list[np.ndarray]  # of each micro-batch of all
    num_rows: list[int]
    bad: list[int]  # unreadable ones among them
