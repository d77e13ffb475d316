"""The position of a run, and the rows it has used. All of it is saved in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.data.seeds import COVERAGE, derive
from harness.data.shards import Segment, bounds, hashed
from harness.distributed.runtime import Runtime
from harness.training.optimizer.schedule import Plateau

EXACT_ROWS = 10_000_000  # up to which Coverage marks each row
_BLOCKS = 1 << 16
_CHUNK = 1 << 20  # rows that are hashed at once: 8 MiB


@dataclass
class State:
    """Counters of a run, equal on every rank except ``train_s`` and ``wall_s``. Epochs and steps count once they
    are finished."""

    epoch: int = 0
    segments: list[Segment] = field(default_factory=list)
    """The steps of this epoch so far, by world size."""
    step: int = 0
    """Optimizer steps, including skipped ones."""
    applied: int = 0
    """Updates that changed the weights; the schedule counts these."""
    skipped: int = 0
    skipped_in_a_row: int = 0
    epoch_applied: int = 0
    """The updates within this epoch."""
    epoch_skipped: int = 0
    rows: int = 0
    """Training rows over all ranks, including those of skipped steps."""
    rows_skipped: int = 0
    """Of ``rows``, those in skipped steps."""
    bad_rows: int = 0
    """Unreadable images, over all ranks."""
    evaluated: int = 0
    """The step of the last evaluation."""
    best: float | None = None
    best_step: int = 0
    since_best: int = 0
    """Evaluations since the best one."""
    wall_s: float = 0.0
    train_s: float = 0.0
    """The part of ``wall_s`` spent in training, on this rank."""
    history: list[dict[str, float]] = field(default_factory=list)
    """One entry per evaluation."""
    plateau: Plateau = field(default_factory=Plateau)
    ended: str = ""
    """Why a hook, or a loop of the user's own, has ended training."""

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

    def forget_evaluations(self) -> None:
        """Make the next evaluation the first, and so the best so far; train on if a hook had ended it."""
        self.ended = ""
        self.history, self.best, self.best_step, self.since_best = [], None, 0, 0
        self.plateau.forget_best()

    def next_epoch(self) -> None:
        self.epoch, self.segments = self.epoch + 1, []
        self.epoch_applied = self.epoch_skipped = 0

    @property
    def in_epoch(self) -> bool:
        return bool(self.segments)

    def to_dict(self) -> dict[str, Any]:
        parts = {"segments": [asdict(each) for each in self.segments], "plateau": asdict(self.plateau)}
        return {**vars(self), **parts, "history": [dict(line) for line in self.history]}  # asdict takes 10 us a line

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> State:
        segments = [Segment(**segment) for segment in values["segments"]]
        return cls(**{**values, "segments": segments, "plateau": Plateau(**values["plateau"])})


class Covered(NamedTuple):
    """The rows that an epoch has used over all ranks, from ``Coverage``."""

    used: int
    """Distinct rows."""
    repeated: int
    """Uses beyond the first of each row."""
    skipped: int
    """Uses in skipped steps."""
    missing: list[str]
    """Up to three rows, or ranges that contain one."""


class Coverage:
    """Counts the rows that an epoch uses, each rank its own.

    Up to EXACT_ROWS rows, each has a mark: a byte here, a bit in a checkpoint. A larger table has _BLOCKS blocks of
    consecutive rows with a count and a sum of keyed 64-bit hashes each, 1 MiB in all. A block with the count and the
    sum of all its rows has each of them once: any other rows have that sum with a probability of 2^-64.
    """

    def __init__(self, num_rows: int, seed: int = 0) -> None:
        self.num_rows = num_rows
        self._marked = num_rows <= EXACT_ROWS
        self.width = 1 if self._marked else -(-num_rows // _BLOCKS)  # rows per block
        num_blocks = -(-num_rows // self.width)
        self._rows = np.zeros(num_blocks, dtype=bool) if self._marked else np.zeros((2, num_blocks), dtype=np.uint64)
        self._uses = [0, 0]  # all, and those in skipped steps
        self._pending: list[np.ndarray] = []  # batched: hashing a few rows at a time would dominate a small step
        self._key = np.uint64(derive(COVERAGE, seed))
        self._whole: np.ndarray | None = None  # the sums of complete blocks, over all ranks, once they are needed

    def add(self, rows: np.ndarray, skipped: bool = False) -> None:
        """Count the ``rows`` of a step, int64."""
        self._uses[0] += len(rows)
        self._uses[1] += len(rows) * skipped
        if self._marked:
            self._rows[rows] = True
            return
        self._pending.append(rows)
        if len(self._pending) == 256:
            self._flush()

    def reduced(self, runtime: Runtime) -> Tensor:
        """Return the record of all ranks, as ``load`` takes it: int64, of shape (2 + rows / 64,) or (2 + 2 * blocks,).
        Collective."""
        self._flush()
        uses = runtime.sum_on_host(torch.tensor(self._uses))
        if not self._marked:
            return torch.cat(
                [uses, runtime.sum_on_host(torch.from_numpy(self._rows.view(np.int64).reshape(-1).copy()))]
            )
        bits = np.packbits(self._rows)
        words = np.pad(bits, (0, -len(bits) % 8)).view(np.int64)
        return torch.cat([uses, runtime.union_on_host(torch.from_numpy(words))])

    def load(self, reduced: Tensor) -> None:
        """Continue from ``reduced``, on one rank; the others start empty."""
        self._uses, record = reduced[:2].tolist(), reduced[2:].numpy()
        self._rows[:] = self._unpacked(record) if self._marked else record.view(np.uint64).reshape(2, -1)

    def covered(self, runtime: Runtime, name: Callable[[int], str] = str) -> Covered:
        """Return what all ranks have used; ``name`` gives rows their names. Collective."""
        reduced = self.reduced(runtime)
        (uses, skipped), record = reduced[:2].tolist(), reduced[2:].numpy()
        if self._marked:
            marks = self._unpacked(record)
            used, missing = int(marks.sum()), [name(row) for row in np.flatnonzero(~marks)[:3].tolist()]
        else:
            counts, sums = record.view(np.uint64).reshape(2, -1)
            used, missing = self._of_blocks(counts, sums, self._sums(runtime), name)
        return Covered(used, uses - used, skipped, missing)

    def clear(self) -> None:
        """Start the next epoch."""
        self._pending.clear()
        self._uses = [0, 0]
        self._rows[:] = 0

    def _unpacked(self, words: np.ndarray) -> np.ndarray:
        return np.unpackbits(words.view(np.uint8), count=self.num_rows).view(bool)

    def _of_blocks(
        self, counts: np.ndarray, sums: np.ndarray, whole: np.ndarray, name: Callable[[int], str]
    ) -> tuple[int, list[str]]:
        """Return (distinct rows, or at most so many if a block has repeated ones; missing rows)."""
        sizes = np.full(len(counts), self.width, np.uint64)
        sizes[-1] = self.num_rows - self.width * (len(counts) - 1)
        lacks = whole - sums  # the hash of the missing row, if it is only one
        partial = np.flatnonzero((counts != sizes) | (lacks != 0))
        used, missing = self.num_rows, list[str]()
        for block in partial.tolist():
            first, size, count = block * self.width, int(sizes[block]), int(counts[block])
            used -= max(size - count, 1)
            if len(missing) < 3:
                rows = np.arange(first, first + size)
                one = rows[self._hashes(rows) == lacks[block]] if count == size - 1 else rows[:0]
                missing.append(name(int(one[0])) if len(one) else f"some of {first} to {first + size - 1}")
        return used, missing

    def _sums(self, runtime: Runtime) -> np.ndarray:
        """Return the sums of complete blocks, of which each rank computes a part, once per run. Collective."""
        if self._whole is None:
            found, at_once = np.zeros_like(self._rows[0]), max(_CHUNK // self.width, 1)
            first, stop = bounds(len(found), runtime.rank, runtime.world_size)
            for block in range(first, stop, at_once):
                end = min(block + at_once, stop)
                rows = np.arange(block * self.width, min(end * self.width, self.num_rows))
                found[block:end] = np.add.reduceat(self._hashes(rows), np.arange(0, len(rows), self.width))
            self._whole = runtime.sum_on_host(torch.from_numpy(found.view(np.int64))).numpy().view(np.uint64)
        return self._whole

    def _hashes(self, rows: np.ndarray) -> np.ndarray:
        return hashed(rows.astype(np.uint64), self._key)

    def _flush(self) -> None:
        if self._pending:
            rows = np.concatenate(self._pending)
            blocks = rows // self.width
            np.add.at(self._rows[0], blocks, np.uint64(1))
            np.add.at(self._rows[1], blocks, self._hashes(rows))
            self._pending.clear()


class Used(NamedTuple):
    """What a step used on this process, for each of its ranks."""

    rows: list[np.ndarray]
    """The rows of each micro-batch of all ranks."""
    num_rows: list[int]
    bad: list[list[int]]
    """The numbers of those that could not be read."""
