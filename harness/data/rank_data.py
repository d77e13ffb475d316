"""The rows of one process, in batches: training steps from any position of an epoch, and evaluation batches.

A *rank* is a logical one here: usually the process; with parallel.logical_ranks, a process computes several in turn.
This process decides which rows each batch has, and worker processes only load them, some batches ahead: resuming at a
position needs no state of theirs. ``shards.shard`` returns the rows that a rank trains on, in order.

The last step of an epoch, the tail, is uneven. 10 rows on 3 ranks, with 3 rows of each in a step: in the first step,
each rank has 3 rows, of weight 1.0; in the second, rank 0 has the last row, of weight 3.0, and ranks 1 and 2 have a
*filler*, a row of weight zero, since all ranks must run the same number of backward passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch

from harness.data.batch import Batch, read
from harness.data.loader import BatchRequest, Loader, StoppedWaiting
from harness.data.own_loop import Passes
from harness.data.row_order import RowOrder
from harness.data.shards import Rule, Segment, bounds, num_rows_in_step, num_rows_left, num_steps, shard


@dataclass
class MicroBatch:
    """The rows of one forward and backward pass."""

    batch: Batch
    weight: float
    """Factor of the mean loss, so that the sum over micro-batches, averaged over ranks, is the mean over all rows of
    the step."""
    rows: np.ndarray
    """Numbers of the rows of this step that are in the batch, without one repeated for batch norm, a filler of weight
    zero, or a substitute for an unreadable row."""
    num_rows: int
    """How many rows of the batch count; with 0, the pass only takes part in communication."""
    rank: int
    ends: bool
    """Whether it is the last of its ``rank`` in the step."""

    @classmethod
    def of(cls, batch: Batch, planned: Part, weight: float) -> MicroBatch:
        as_planned = len(batch.rows) == len(planned.rows) and not batch.bad
        rows = batch.rows if as_planned else np.intersect1d(batch.rows, planned.rows)
        return cls(batch, weight, rows, len(planned.rows), planned.rank, planned.ends)


class Part(NamedTuple):
    """The rows of one micro-batch of ``rank``: number ``number`` of the ``num`` that the rank has in a step."""

    rank: int
    rows: np.ndarray
    number: int
    num: int

    @property
    def ends(self) -> bool:
        return self.number == self.num - 1


@dataclass(frozen=True)
class TrainData:
    """The training rows of one process, which computes ``ranks`` of ``num_ranks``, in groups: the micro-batches of one
    optimizer step."""

    loader: Loader
    rule: Rule
    ranks: range
    num_ranks: int
    per_rank: int  # rows of a rank in a step
    accumulate: int  # micro-batches of a rank in a step, at most
    seed: int
    tail: Literal["use", "drop"] = "use"
    batch_norm_spans_ranks: bool = False
    """Whether batch norms compute with the rows of all ranks, so that a rank may have a single one."""
    _passes: Passes = field(default_factory=Passes)

    @property
    def num_rows(self) -> int:
        return len(self.loader.dataset)

    def steps_per_epoch(self) -> int:
        return num_steps(self.num_rows, self.num_ranks, self.per_rank, self.tail)

    def steps_left(self, segments: Sequence[Segment], ranks_of: Segment | None = None) -> int:
        """Return the number of steps of an epoch after ``segments``, taken by the ranks of the segment ``ranks_of``, by
        default by the current ones: the same on every rank."""
        num_ranks, per_rank = (ranks_of.num_ranks, ranks_of.per_rank) if ranks_of else (self.num_ranks, self.per_rank)
        return num_steps(num_rows_left(self.num_rows, segments), num_ranks, per_rank, self.tail)

    def advance(self, segments: list[Segment]) -> None:
        """Add one step by the current ranks to ``segments``, in place."""
        if not segments or not self._is_current(segments[-1]):
            segments.append(Segment(self.num_ranks, self.per_rank, 0))
        segments[-1].steps += 1

    def _is_current(self, segment: Segment) -> bool:
        return segment.num_ranks == self.num_ranks and segment.per_rank == self.per_rank

    def groups(self, epoch: int, segments: Sequence[Segment]) -> Iterator[list[MicroBatch]]:
        """Yield the groups of ``epoch`` after ``segments``: the same number on every rank, fewer only if the loader's
        ``leave`` ended a wait. Raises TrainingError if the list ``segments`` comes back unchanged again and again."""
        position = self._passes.start(epoch, segments)
        done, first_step = list(segments), 0
        if done and self._is_current(done[-1]):
            first_step = done.pop().steps  # the current ranks continue the last segment with the same assignment
        num_left = num_rows_left(self.num_rows, done)
        shards = {
            rank: shard(self.rule, self.num_rows, rank, self.num_ranks, epoch, self.seed, done) for rank in self.ranks
        }
        steps = range(first_step, num_steps(num_left, self.num_ranks, self.per_rank, self.tail))
        requests = (  # the loader takes them ahead of the steps
            BatchRequest(self._rows_to_load(part, shards[part.rank], num_left, step), epoch)
            for step in steps
            for part in self._micro_batches(shards, num_left, step)
        )
        batches = self.loader.fetch(requests)
        for step in steps:
            total = num_rows_in_step(num_left, self.num_ranks, self.per_rank, step)
            parts = self._micro_batches(shards, num_left, step)
            try:
                group = list(itertools.islice(batches, len(parts)))
            except StoppedWaiting:
                return
            yield [
                # Averaging over ranks divides by ``num_ranks``. The weight is exactly 1.0 for equal parts.
                MicroBatch.of(batch, part, len(part.rows) * self.num_ranks / total)
                for part, batch in zip(parts, group, strict=True)
            ]
        self._passes.end(segments, position)

    def _micro_batches(self, shards: Mapping[int, RowOrder], num_left: int, step: int) -> list[Part]:
        """Return the rows of this process in ``step``, in the same number of parts on every rank.

        In the tail, parts are uneven, and may be empty: ``_rows_to_load`` then gives them a filler.
        """
        first_row = step * self.per_rank
        longest = min(self.per_rank, -(-num_left // self.num_ranks) - first_row)
        num_parts = -(-longest // (self.per_rank // self.accumulate))
        return [
            Part(rank, rows, number, num_parts)
            for rank, order in shards.items()
            for number, rows in enumerate(np.array_split(order[first_row : first_row + self.per_rank], num_parts))
        ]

    def _rows_to_load(self, part: Part, order: RowOrder, num_left: int, step: int) -> np.ndarray:
        """Return the rows of ``part``, or a filler of the rows of its rank, ``order``. A single row is repeated if
        batch norm, which rejects one row, would see no other: the mean loss is unchanged."""
        rows = part.rows
        if not len(rows):
            rows = order[:1] if len(order) else np.zeros(1, np.int64)
        if len(rows) != 1 or (self.batch_norm_spans_ranks and self._num_rows_of_all(num_left, step, part) > 1):
            return rows
        return np.repeat(rows, 2)

    def _num_rows_of_all(self, num_left: int, step: int, part: Part) -> int:
        """Return the number of rows in the micro-batch ``part.number`` of ``step`` over all ranks."""
        short, num_long = divmod(num_left, self.num_ranks)
        total = 0
        for length, num_shards in ((short + 1, num_long), (short, self.num_ranks - num_long)):
            in_step = min(max(length - step * self.per_rank, 0), self.per_rank)
            total += num_shards * (in_step // part.num + (part.number < in_step % part.num))  # as np.array_split
        return total

    def any_inputs(self) -> torch.Tensor:
        """Return the inputs of one row, on the device, for a pass that does not count."""
        return read(self.loader.dataset, np.zeros(1, np.int64), 0).to(self.loader.device).inputs


@dataclass(frozen=True)
class EvalData:
    """The evaluation rows of one process, which computes ``ranks`` of ``num_ranks``. Each rank has a contiguous shard
    without padding, so the ranks together see each row once."""

    loader: Loader
    ranks: range
    num_ranks: int
    batch_size: int
    most_ranks: int = 1
    """The number of ranks of the process that has the most."""

    @property
    def num_rows(self) -> int:
        return len(self.loader.dataset)

    def num_turns(self) -> int:
        """Return the number of turns of each process: how often it must check for a stop."""
        longest = -(-self.num_rows // self.num_ranks)
        return -(-longest // self.batch_size) * self.most_ranks

    def turns(self) -> Iterator[tuple[int, Batch | None]]:
        """Yield (rank, batch), rank by rank, then (rank, None) without end: the caller takes ``num_turns``, as many on
        every process, so that all take part in the same collectives."""
        rows_by_rank = {rank: [*self._requests(rank)] for rank in self.ranks}
        batches = self.loader.fetch(BatchRequest(rows, None) for rank in self.ranks for rows in rows_by_rank[rank])
        for rank in self.ranks:
            for _ in rows_by_rank[rank]:
                yield rank, next(batches, None)
        while True:
            yield self.ranks.start, None

    def first(self) -> Batch | None:
        """Return the first batch of this process, on the device; None if it has no rows, or if training is to stop."""
        rows = next(self._requests(self.ranks.start), None)
        return None if rows is None else self.loader.first(rows)

    def _requests(self, rank: int) -> Iterator[np.ndarray]:
        start, stop = bounds(self.num_rows, rank, self.num_ranks)
        for edge in range(start, stop, self.batch_size):
            yield np.arange(edge, min(edge + self.batch_size, stop))
