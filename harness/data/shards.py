"""Shard rules: which rows a rank trains on, and in which order. Pure functions of numbers, without communication.

An epoch is a sequence of optimizer steps. Every row is in exactly one step of one rank, but for an incomplete last step
that data.tail=drop leaves out, and every rank takes the same number of steps.

    contiguous  rank r of W owns rows [int(r*N/W), int((r+1)*N/W)) of the N rows, shuffled within each epoch
    strided     rank r owns rows r, r+W, r+2W, ..., shuffled within each epoch
    global      one permutation of all rows per epoch, from (seed, epoch) only; rank r takes elements r, r+W, ... of it,
                so step k has the same rows at every W with the same global batch

Of eight rows on two ranks, before each shuffles its own: contiguous 0 1 2 3 and 4 5 6 7; strided 0 2 4 6 and 1 3 5 7;
global p0 p2 p4 p6 and p1 p3 p5 p7 of the permutation p.

A ``RowOrder`` computes rows when they are asked for: ``at`` maps an array of positions to rows. ``permutation(n, key)``
is such a function, which shuffles range(n).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from harness.data.row_order import RowOrder, permutation
from harness.errors import ConfigError

Rule = Literal["contiguous", "strided", "global"]
RULES = get_args(Rule)
_ORDER, _SHUFFLE = 11, 12  # distinguish the two uses of (seed, epoch)


def bounds(num_rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the first row and the end of a contiguous shard.

    Scripts for Apex write int(rank*rows/world). Integer division gives the same up to 2^40 rows, and is exact above.
    """
    return rank * num_rows // num_ranks, (rank + 1) * num_rows // num_ranks


@dataclass
class Segment:
    """Consecutive steps of an epoch by the same ranks: ``steps`` steps with ``per_rank`` rows of each."""

    num_ranks: int
    per_rank: int
    steps: int


def shard(
    rule: Rule, num_rows: int, rank: int, num_ranks: int, epoch: int, seed: int, segments: Sequence[Segment] = ()
) -> RowOrder:
    """Return the rows of ``rank`` in ``epoch``, in training order, of those that the ``segments`` of other ranks before
    it have left. Shards are disjoint, and together they have all of these."""
    if rule not in RULES:
        raise ConfigError(f"there is no shard rule {rule!r}", hint=f"give one of {', '.join(RULES)}")
    order = permutation(num_rows, (_ORDER, seed, epoch)) if rule == "global" else lambda index: index
    remaining = RowOrder(num_rows, order)
    for index, segment in enumerate(segments):
        remaining = _remaining(rule, remaining, segment, (seed, epoch, index))
    return _share(rule, remaining, rank, num_ranks, (seed, epoch, len(segments)))


def _share(rule: Rule, rows: RowOrder, rank: int, num_ranks: int, key: tuple[int, int, int]) -> RowOrder:
    """Return the part of ``rows`` that ``rank`` trains on, in order."""
    num_strided = len(range(rank, len(rows), num_ranks))
    if rule == "global":
        return RowOrder(num_strided, lambda index: rows.at(rank + index * num_ranks))
    start, stop = bounds(len(rows), rank, num_ranks)
    length = num_strided if rule == "strided" else stop - start
    order = permutation(length, (_SHUFFLE, *key, rank))
    if rule == "strided":
        return RowOrder(length, lambda index: rows.at(rank + order(index) * num_ranks))
    return RowOrder(length, lambda index: rows.at(start + order(index)))


def _remaining(rule: Rule, rows: RowOrder, segment: Segment, key: tuple[int, int, int]) -> RowOrder:
    """Return the rows that ``segment`` has not used, in the order in which they are assigned next: what is left of the
    permutation (global), or of each rank in turn.

    For example, 2 ranks took 1 step of 1 row each, of 8 rows by the rule contiguous. Left are the last 3 rows of either
    shard: ``ends`` is [3, 6], ``firsts`` [0, 3], and row 4 of what is left is row 4 - 3 + 1 of the shard of rank 1."""
    most = segment.steps * segment.per_rank
    if rule == "global":
        num_used = min(most * segment.num_ranks, len(rows))
        return RowOrder(len(rows) - num_used, lambda index: rows.at(num_used + index))
    shards = [_share(rule, rows, rank, segment.num_ranks, key) for rank in range(segment.num_ranks)]
    ends = np.cumsum([max(len(rank_rows) - most, 0) for rank_rows in shards])
    firsts = np.concatenate([[0], ends[:-1]])

    def at(index: np.ndarray) -> np.ndarray:
        owner, result = np.searchsorted(ends, index, side="right"), np.empty(len(index), np.int64)
        for rank in np.unique(owner).tolist():
            is_owned = owner == rank
            result[is_owned] = shards[rank].at(index[is_owned] - firsts[rank] + most)
        return result

    return RowOrder(int(ends[-1]), at)


def num_rows_used(num_rows: int, segment: Segment) -> int:
    """Return the number of rows of ``num_rows`` that ``segment`` uses, over all ranks."""
    short, num_long = divmod(num_rows, segment.num_ranks)  # ``num_long`` ranks have one row more than ``short``
    most = segment.steps * segment.per_rank  # of a rank
    return num_long * min(most, short + 1) + (segment.num_ranks - num_long) * min(most, short)


def num_rows_left(num_rows: int, segments: Sequence[Segment]) -> int:
    """Return the number of rows of an epoch that ``segments`` have not used, over all ranks."""
    for segment in segments:
        num_rows -= num_rows_used(num_rows, segment)
    return num_rows


def num_steps(num_rows: int, num_ranks: int, per_rank: int, tail: Literal["use", "drop"] = "use") -> int:
    """Return the number of steps for ``num_rows`` rows: equal on every rank, whose shards differ by at most a row."""
    if tail not in ("use", "drop"):
        raise ConfigError(f"there is no tail {tail!r}", hint="give tail='use' or tail='drop'")
    longest, shortest = -(-num_rows // num_ranks), num_rows // num_ranks
    return -(-longest // per_rank) if tail == "use" else shortest // per_rank


def num_rows_in_step(num_rows: int, num_ranks: int, per_rank: int, step: int) -> int:
    """Return the number of rows in step ``step`` over all ranks: a full global batch, except in the tail."""
    before, after = (num_rows_used(num_rows, Segment(num_ranks, per_rank, steps)) for steps in (step, step + 1))
    return after - before
