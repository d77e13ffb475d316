"""Shard rules: which rows a rank trains on, and in which order. Pure functions of numbers, without communication.

An epoch is a sequence of optimizer steps. Every row is in exactly one step of one rank, and every rank takes the same
number of steps. If a run is resumed within an epoch at another world size, only the remaining rows are assigned.

    contiguous  rank r owns rows [int(r*N/W), int((r+1)*N/W)) of the file, shuffled within each epoch
    strided     rank r owns rows r, r+W, r+2W, ..., shuffled within each epoch
    global      one permutation of all rows per epoch, from (seed, epoch) only; rank r takes elements r, r+W, ... of it,
                so step k has the same rows at every world size with the same global batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RowNumbers = np.ndarray  # int64

RULES = ("contiguous", "strided", "global")
_ORDER, _SHUFFLE = 11, 12  # distinguish the two uses of (seed, epoch)


def bounds(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """First row and end of a contiguous shard.

    The recipe writes int(rank*rows/world). Integer division gives the same up to 2^40 rows, and is exact above.
    """
    return rank * num_rows // world_size, (rank + 1) * num_rows // world_size


@dataclass
class Segment:
    """Consecutive steps of an epoch at one world size: ``steps`` steps with ``per_rank`` rows per rank."""

    world_size: int
    per_rank: int
    steps: int


def shard(
    rule: str, num_rows: int, rank: int, world_size: int, epoch: int, seed: int, segments: Sequence[Segment] = ()
) -> RowNumbers:
    """The rows of ``rank`` in ``epoch`` after the completed ``segments``, in training order.

    Shards are disjoint, and together they have all rows that are left.
    """
    left = _left_over(rule, num_rows, epoch, seed, segments)
    return _share(rule, left, rank, world_size, (seed, epoch, len(segments)))


def _left_over(rule: str, num_rows: int, epoch: int, seed: int, segments: Sequence[Segment]) -> RowNumbers | range:
    """The rows of the epoch that ``segments`` have not used, in the order in which they are assigned next."""
    order = _order(rule, num_rows, epoch, seed)
    if not segments:
        return order
    left: RowNumbers = np.asarray(order)
    for part, segment in enumerate(segments):
        used = np.zeros(num_rows, dtype=bool)
        for rank in range(segment.world_size):
            rows = _share(rule, left, rank, segment.world_size, (seed, epoch, part))
            used[rows[: segment.steps * segment.per_rank]] = True
        left = left[~used[left]]
    return left


def num_steps(num_rows: int, world_size: int, per_rank: int, tail: str = "use") -> int:
    """Number of optimizer steps, equal on every rank, for ``num_rows`` rows. Shards differ by at most one row."""
    longest, shortest = -(-num_rows // world_size), num_rows // world_size
    return -(-longest // per_rank) if tail == "use" else shortest // per_rank


def step_rows(num_rows: int, world_size: int, per_rank: int, step: int) -> int:
    """Number of rows in step ``step`` over all ranks: a full global batch, except in the tail."""
    short, long = num_rows // world_size, -(-num_rows // world_size)
    num_long = num_rows % world_size

    def rows(length: int) -> int:
        return min(max(length - step * per_rank, 0), per_rank)

    return num_long * rows(long) + (world_size - num_long) * rows(short)


def _order(rule: str, num_rows: int, epoch: int, seed: int) -> RowNumbers | range:
    """All rows before they are shared. File order is a range, so the cost of a shard depends on its own rows only."""
    if rule == "global":
        return np.random.default_rng((_ORDER, seed, epoch)).permutation(num_rows)
    return range(num_rows)


def _share(rule: str, rows: RowNumbers | range, rank: int, world_size: int, key: tuple[int, int, int]) -> RowNumbers:
    """The part of ``rows`` that ``rank`` trains on, in order."""
    if rule == "global":
        return np.asarray(rows[rank::world_size])
    if rule == "strided":
        own = np.asarray(rows[rank::world_size], dtype=np.int64)
    elif rule == "contiguous":
        own = np.asarray(rows[slice(*bounds(len(rows), rank, world_size))], dtype=np.int64)
    else:
        raise ValueError(f"unknown shard rule {rule!r}; use {', '.join(RULES)}")
    return np.random.default_rng((_SHUFFLE, *key, rank)).permutation(own)
