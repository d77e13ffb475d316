"""The rows that an epoch has used over all ranks, which a checkpoint keeps.

Up to EXACT_ROWS rows, each has a mark: a byte here, a bit in a checkpoint. A larger table is divided into blocks of
consecutive rows, whose rows are counted and hashed: 1 MiB in all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from harness.data.row_order import hashed
from harness.data.seeds import Purpose, derive
from harness.data.shards import bounds
from harness.distributed.runtime import Runtime

EXACT_ROWS = 10_000_000
_BLOCKS = 1 << 16
_CHUNK = 1 << 20  # rows that are hashed at once: 8 MiB


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

    @property
    def updated(self) -> int:
        """Distinct rows that updated the weights; if rows were repeated, at most so many."""
        return min(self.used, self.used + self.repeated - self.skipped)


class Coverage:
    """Counts the rows that an epoch uses, each rank its own."""

    def __init__(self, num_rows: int, seed: int = 0) -> None:
        self.num_rows = num_rows
        self._uses = [0, 0]  # all, and those in skipped steps
        self._record: _Record = MarkedRows(num_rows) if num_rows <= EXACT_ROWS else HashedBlocks(num_rows, seed)

    def add(self, rows: np.ndarray, skipped: bool = False) -> None:
        """Count the ``rows`` of a step, int64."""
        self._uses[0] += len(rows)
        self._uses[1] += len(rows) if skipped else 0
        self._record.add(rows)

    def reduced(self, runtime: Runtime) -> Tensor:
        """Return the record of all ranks, as ``load`` takes it: int64, of shape (2 + rows / 64,) or (2 + 2 * blocks,).
        Collective."""
        return torch.cat([runtime.sum_on_host(torch.tensor(self._uses)), self._record.reduced(runtime)])

    def load(self, reduced: Tensor) -> None:
        """Continue from ``reduced``, on one rank; the others start empty."""
        self._uses = reduced[:2].tolist()
        self._record.load(reduced[2:].numpy())

    def covered(self, runtime: Runtime, name: Callable[[int], str] = str) -> Covered:
        """Return what all ranks have used; ``name`` gives rows their names. Collective."""
        reduced = self.reduced(runtime)
        uses, skipped = reduced[:2].tolist()
        num_used, missing = self._record.covered(reduced[2:].numpy(), runtime, name)
        return Covered(num_used, uses - num_used, skipped, missing)

    def clear(self) -> None:
        """Start the next epoch."""
        self._uses = [0, 0]
        self._record.clear()


class _Record(Protocol):
    """The rows that a rank has used, in one of two forms."""

    def add(self, rows: np.ndarray) -> None: ...

    def reduced(self, runtime: Runtime) -> Tensor:
        """Return the record of all ranks, int64. Collective."""
        ...

    def load(self, record: np.ndarray) -> None:
        """Continue from ``record``, which ``reduced`` has returned."""
        ...

    def covered(self, record: np.ndarray, runtime: Runtime, name: Callable[[int], str]) -> tuple[int, list[str]]:
        """Return (the distinct rows of ``record``, or at most so many if some are repeated; the names of up to three
        others, or ranges that contain one). Collective."""
        ...

    def clear(self) -> None: ...


class MarkedRows:
    """Marks each row that is used."""

    def __init__(self, num_rows: int) -> None:
        self._marks = np.zeros(num_rows, dtype=bool)

    def add(self, rows: np.ndarray) -> None:
        self._marks[rows] = True

    def reduced(self, runtime: Runtime) -> Tensor:
        bits = np.packbits(self._marks)
        words = np.pad(bits, (0, -len(bits) % 8)).view(np.int64)
        return runtime.union_on_host(torch.from_numpy(words))

    def load(self, record: np.ndarray) -> None:
        self._marks[:] = self._unpacked(record)

    def covered(self, record: np.ndarray, runtime: Runtime, name: Callable[[int], str]) -> tuple[int, list[str]]:
        marks = self._unpacked(record)
        return int(marks.sum()), [name(row) for row in np.flatnonzero(~marks)[:3].tolist()]

    def clear(self) -> None:
        self._marks[:] = False

    def _unpacked(self, words: np.ndarray) -> np.ndarray:
        return np.unpackbits(words.view(np.uint8), count=len(self._marks)).view(bool)


class HashedBlocks:
    """Keeps, for each block of consecutive rows, the count of its rows that are used and the sum of their keyed 64-bit
    hashes. A block with the count and the sum of all its rows has each of them once: any other rows have that sum with
    a probability of 2^-64."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self._num_rows = num_rows
        self._width = -(-num_rows // _BLOCKS)  # rows per block
        num_blocks = -(-num_rows // self._width)
        self._counts_and_sums = np.zeros((2, num_blocks), dtype=np.uint64)
        self._pending: list[np.ndarray] = []  # batched: hashing a few rows at a time would dominate a small step
        self._key = np.uint64(derive(Purpose.COVERAGE, seed))
        self._whole: np.ndarray | None = None  # the sums of complete blocks, over all ranks, once they are needed

    def add(self, rows: np.ndarray) -> None:
        self._pending.append(rows)
        if len(self._pending) == 256:
            self._flush()

    def reduced(self, runtime: Runtime) -> Tensor:
        self._flush()
        return runtime.sum_on_host(torch.from_numpy(self._counts_and_sums.view(np.int64).reshape(-1).copy()))

    def load(self, record: np.ndarray) -> None:
        self._counts_and_sums[:] = record.view(np.uint64).reshape(2, -1)

    def covered(self, record: np.ndarray, runtime: Runtime, name: Callable[[int], str]) -> tuple[int, list[str]]:
        counts, sums = record.view(np.uint64).reshape(2, -1)
        sizes = np.full(len(counts), self._width, np.uint64)
        sizes[-1] = self._num_rows - self._width * (len(counts) - 1)
        lacks = self._sums(runtime) - sums  # the hash of the missing row, if it is only one
        partial = np.flatnonzero((counts != sizes) | (lacks != 0))
        num_used, missing = self._num_rows, list[str]()
        for block in partial.tolist():
            first, size, count = block * self._width, int(sizes[block]), int(counts[block])
            num_used -= max(size - count, 1)
            if len(missing) < 3:
                rows = np.arange(first, first + size)
                missing_row = rows[self._hashes(rows) == lacks[block]] if count == size - 1 else rows[:0]
                if len(missing_row):
                    missing.append(name(int(missing_row[0])))
                else:
                    missing.append(f"some of {name(first)} to {name(first + size - 1)}")
        return num_used, missing

    def clear(self) -> None:
        self._pending.clear()
        self._counts_and_sums[:] = 0

    def _sums(self, runtime: Runtime) -> np.ndarray:
        """Return the sums of complete blocks, of which each rank computes a part, once per run. Collective."""
        if self._whole is None:
            sums, at_once = np.zeros_like(self._counts_and_sums[0]), max(_CHUNK // self._width, 1)
            first, stop = bounds(len(sums), runtime.rank, runtime.world_size)
            for block in range(first, stop, at_once):
                end = min(block + at_once, stop)
                rows = np.arange(block * self._width, min(end * self._width, self._num_rows))
                sums[block:end] = np.add.reduceat(self._hashes(rows), np.arange(0, len(rows), self._width))
            self._whole = runtime.sum_on_host(torch.from_numpy(sums.view(np.int64))).numpy().view(np.uint64)
        return self._whole

    def _hashes(self, rows: np.ndarray) -> np.ndarray:
        return hashed(rows.astype(np.uint64), self._key)

    def _flush(self) -> None:
        if self._pending:
            rows = np.concatenate(self._pending)
            counts, sums = self._counts_and_sums
            blocks = rows // self._width
            np.add.at(counts, blocks, np.uint64(1))
            np.add.at(sums, blocks, self._hashes(rows))
            self._pending.clear()
