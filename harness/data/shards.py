"""Which rows a rank trains on, in which order. Pure functions of numbers; no rank is asked anything.

An epoch is a sequence of optimizer steps. Every row is in exactly one of them, over all ranks, and every rank takes
the same number of steps. A run resumed inside an epoch at another world size deals only the rows still left.

    contiguous  rank r owns rows [int(r*N/W), int((r+1)*N/W)) of the file, shuffled inside each epoch
    strided     rank r owns rows r, r+W, r+2W, …, shuffled inside each epoch
    global      one permutation of all rows an epoch, from (seed, epoch) alone; rank r takes r, r+W, … of it, so the
                rows of step k are the same at every world size that has the same global batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Rows = np.ndarray  # of int64, row numbers of the annotation table

RULES = ("contiguous", "strided", "global")
_ORDER, _SHUFFLE = 11, 12  # keep the two uses of (seed, epoch) apart


def bounds(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and last+1 row of a contiguous shard.

    The recipe writes int(rank*rows/world); whole-number division gives the same up to 2^40 rows, and is exact beyond.
    """
    return rank * num_rows // world_size, (rank + 1) * num_rows // world_size


def shard(rule: str, num_rows: int, rank: int, world_size: int, epoch: int, seed: int) -> Rows:
    """The rows of ``rank`` in ``epoch``, in training order. Disjoint over ranks, and together all rows."""
    return _deal(rule, _order(rule, num_rows, epoch, seed), rank, world_size, (seed, epoch, 0))


@dataclass
class Segment:
    """A stretch of an epoch that one gang of ranks trained: ``steps`` steps of ``per_rank`` rows a rank."""

    world_size: int
    per_rank: int
    steps: int


def left_over(rule: str, num_rows: int, epoch: int, seed: int, segments: Sequence[Segment]) -> Rows | range:
    """The rows of the epoch that ``segments`` have not used, in the order in which they are dealt next."""
    order = _order(rule, num_rows, epoch, seed)
    if not segments:
        return order
    left: Rows = np.asarray(order)
    for part, segment in enumerate(segments):
        used = np.zeros(num_rows, dtype=bool)
        for rank in range(segment.world_size):
            rows = _deal(rule, left, rank, segment.world_size, (seed, epoch, part))
            used[rows[: segment.steps * segment.per_rank]] = True
        left = left[~used[left]]
    return left


def plan(
    rule: str, num_rows: int, rank: int, world_size: int, epoch: int, seed: int, segments: Sequence[Segment]
) -> Rows:
    """The rows of ``rank`` for the rest of ``epoch``, after the stretches that are done."""
    left = left_over(rule, num_rows, epoch, seed, segments)
    return _deal(rule, left, rank, world_size, (seed, epoch, len(segments)))


def num_steps(num_rows: int, world_size: int, per_rank: int, tail: str = "use") -> int:
    """Optimizer steps that every rank takes to train ``num_rows`` rows. Shards differ by at most one row."""
    longest, shortest = -(-num_rows // world_size), num_rows // world_size
    return -(-longest // per_rank) if tail == "use" else shortest // per_rank


def step_rows(num_rows: int, world_size: int, per_rank: int, step: int) -> int:
    """Rows of step ``step`` over all ranks: a full global batch, but for the tail."""
    short, long = num_rows // world_size, -(-num_rows // world_size)
    num_long = num_rows % world_size

    def rows(length: int) -> int:
        return min(max(length - step * per_rank, 0), per_rank)

    return num_long * rows(long) + (world_size - num_long) * rows(short)


def _order(rule: str, num_rows: int, epoch: int, seed: int) -> Rows | range:
    """All rows, before they are dealt; file order is a range, so that a shard of it costs only its own rows."""
    if rule == "global":
        return np.random.default_rng((_ORDER, seed, epoch)).permutation(num_rows)
    return range(num_rows)


def _deal(rule: str, rows: Rows | range, rank: int, world_size: int, key: tuple[int, int, int]) -> Rows:
    """The part of ``rows`` that ``rank`` trains on, in order."""
    if rule == "global":
        return np.asarray(rows[rank::world_size])
    if rule == "strided":
        own = np.asarray(rows[rank::world_size], dtype=np.int64)
    elif rule == "contiguous":
        own = np.asarray(rows[slice(*bounds(len(rows), rank, world_size))], dtype=np.int64)
    else:
        raise ValueError(f"unknown shard rule {rule!r}; there are {', '.join(RULES)}")
    return np.random.default_rng((_SHUFFLE, *key, rank)).permutation(own)
