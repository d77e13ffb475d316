"""From a dataset to the batches of one rank: training groups from any position on, and evaluation batches.

A dataset is anything with ``len()`` and ``batch(rows, epoch) -> Batch``. Loading runs in worker processes; which rows
are asked for is decided here, in the training process, so a position needs no help from the workers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from harness.data.batch import Batch, Dataset
from harness.data.loader_workers import in_loader_worker
from harness.data.shards import Segment, bounds, num_steps, plan, step_rows
from harness.errors import HarnessError


@dataclass(frozen=True)
class Request:
    rows: np.ndarray
    epoch: int | None


class _Requests(Sampler):
    """What the workers are asked for next. One loader serves many epochs, so that its workers live on."""

    def __init__(self) -> None:
        self.pending: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.pending)


class _Fetch(torch.utils.data.Dataset):
    """A batch for a request. An error comes back as a value: torch would bury its text in a worker's traceback."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, request: Request) -> Batch | HarnessError:
        try:
            return self.dataset.batch(request.rows, request.epoch)
        except HarnessError as error:
            return error


class Loader:
    """Batches of ``dataset``, fetched by ``num_workers`` processes and moved to ``device``."""

    def __init__(self, dataset: Dataset, num_workers: int, device: torch.device) -> None:
        self.dataset, self.device = dataset, device
        self.wait_s = 0.0  # time that training stood still for want of data
        self._requests = _Requests()
        self._loader = DataLoader(
            _Fetch(dataset),
            sampler=self._requests,
            batch_size=None,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=in_loader_worker,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # its own, or starting an epoch would advance the training stream
        )

    def fetch(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """The batches of ``requests``, in order, on the device."""
        self._requests.pending = requests
        batches = iter(self._loader)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.wait_s += time.perf_counter() - start
            if batch is None:
                return
            if isinstance(batch, HarnessError):
                raise batch
            yield batch.to(self.device)

    def close(self) -> None:
        """End the worker processes."""
        iterator: Any = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


@dataclass
class MicroBatch:
    """A part of a step on one rank; ``weight`` makes the sum over micro-batches and the average over ranks a mean over
    all rows of the step, however they are spread. ``num_rows`` rows of the batch count; one without only keeps the
    ranks in step.
    """

    batch: Batch
    weight: float
    num_rows: int


@dataclass(frozen=True)
class TrainData:
    """The training rows of one rank, as groups: the micro-batches of one optimizer step."""

    loader: Loader
    rule: str
    rank: int
    world_size: int
    per_rank: int
    accumulate: int
    seed: int
    tail: str = "use"
    batch_norm_spans_ranks: bool = False  # so that a single row of a rank is enough for it

    @property
    def num_rows(self) -> int:
        return len(self.loader.dataset)

    def steps_per_epoch(self) -> int:
        return num_steps(self.num_rows, self.world_size, self.per_rank, self.tail)

    def steps_left(self, segments: Sequence[Segment]) -> int:
        """Steps that remain of an epoch of which ``segments`` are done. The same number on every rank."""
        left = self.num_rows - sum(self._rows_of(segments))
        return num_steps(left, self.world_size, self.per_rank, self.tail)

    def advance(self, segments: list[Segment]) -> None:
        """Book one more step by the present gang of ranks, in place."""
        if not segments or not self._ours(segments[-1]):
            segments.append(Segment(self.world_size, self.per_rank, 0))
        segments[-1].steps += 1

    def _ours(self, segment: Segment) -> bool:
        return segment.world_size == self.world_size and segment.per_rank == self.per_rank

    def groups(self, epoch: int, segments: Sequence[Segment]) -> Iterator[list[MicroBatch]]:
        """The groups of ``epoch`` from where ``segments`` end. All ranks yield the same number."""
        done, first = list(segments), 0
        if done and self._ours(done[-1]):
            first = done.pop().steps  # the last stretch is ours: its deal goes on, it is not dealt anew
        num_left = self.num_rows - sum(self._rows_of(done))
        rows = plan(self.rule, self.num_rows, self.rank, self.world_size, epoch, self.seed, done)
        steps = range(first, num_steps(num_left, self.world_size, self.per_rank, self.tail))
        filler = rows[:1] if len(rows) else np.zeros(1, np.int64)
        requests = (
            Request(self._enough(part if len(part) else filler, num_left, step, index, len(parts)), epoch)
            for step in steps
            for parts in (self._micro_batches(rows, num_left, step),)
            for index, part in enumerate(parts)
        )
        batches = self.loader.fetch(requests)
        for step in steps:
            scale = self.world_size / step_rows(num_left, self.world_size, self.per_rank, step)
            parts = self._micro_batches(rows, num_left, step)
            yield [
                MicroBatch(batch, len(part) * scale, len(part))
                for part, batch in zip(parts, itertools.islice(batches, len(parts)), strict=True)
            ]

    def _micro_batches(self, rows: np.ndarray, num_left: int, step: int) -> list[np.ndarray]:
        """This rank's rows of ``step``, in as many parts as every rank has. In the tail parts are uneven, even empty:
        ranks must run the same backward passes, so an empty part is filled with a row of weight zero.
        """
        first = step * self.per_rank
        longest = min(self.per_rank, -(-num_left // self.world_size) - first)
        num_parts = -(-longest // (self.per_rank // self.accumulate))
        return np.array_split(rows[first : first + self.per_rank], num_parts)

    def _enough(self, rows: np.ndarray, num_left: int, step: int, index: int, num_parts: int) -> np.ndarray:
        """A single row twice where batch norm, which refuses that, would see it alone; the mean loss stays the same."""
        if len(rows) != 1 or (self.batch_norm_spans_ranks and self._gang_rows(num_left, step, index, num_parts) > 1):
            return rows
        return np.repeat(rows, 2)

    def _gang_rows(self, num_left: int, step: int, index: int, num_parts: int) -> int:
        """Rows of micro-batch ``index`` of ``step`` over all ranks."""
        short, num_long = divmod(num_left, self.world_size)

        def rows(length: int) -> int:
            whole, rest = divmod(min(max(length - step * self.per_rank, 0), self.per_rank), num_parts)
            return whole + (index < rest)

        return num_long * rows(short + 1) + (self.world_size - num_long) * rows(short)

    def any_inputs(self) -> torch.Tensor:
        """The inputs of a single row, on the device: for a pass that does not count."""
        return self.loader.dataset.batch(np.zeros(1, np.int64), 0).to(self.loader.device).inputs

    def _rows_of(self, segments: Sequence[Segment]) -> Iterator[int]:
        left = self.num_rows
        for segment in segments:
            rows = sum(step_rows(left, segment.world_size, segment.per_rank, step) for step in range(segment.steps))
            left -= rows
            yield rows


@dataclass(frozen=True)
class EvalData:
    """The evaluation rows of one rank: an unpadded contiguous shard, so that all ranks together see each row once."""

    loader: Loader
    rank: int
    world_size: int
    batch_size: int

    @property
    def num_rows(self) -> int:
        return len(self.loader.dataset)

    def num_batches(self) -> int:
        """Batches of the rank that has most: how often every rank must ask whether to stop."""
        longest = -(-self.num_rows // self.world_size)
        return -(-longest // self.batch_size)

    def batches(self) -> Iterator[Batch]:
        start, stop = bounds(self.num_rows, self.rank, self.world_size)
        edges = range(start, stop, self.batch_size)
        return self.loader.fetch(Request(np.arange(edge, min(edge + self.batch_size, stop)), None) for edge in edges)
