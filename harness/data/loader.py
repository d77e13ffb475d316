"""The batches of one rank: training steps from any position of an epoch, and evaluation batches.

Worker processes load the batches (loader_workers.py). The training process decides which rows each batch has, so
resuming at a position needs no state of the workers.
"""

from __future__ import annotations

import copy
import errno
import functools
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler, get_worker_info

from harness.data.batch import STAGES, Batch, Dataset, copied_ahead, read
from harness.data.loader_workers import (
    PREFETCH,
    LoadError,
    PickledResult,
    WatchedDataLoader,
    in_loader_worker,
    pickle_result,
    worker_death,
)
from harness.data.row_order import RowOrder
from harness.data.shards import Rule, Segment, bounds, num_rows_in_step, num_rows_used, num_steps, shard
from harness.distributed.machine import run_queue_s
from harness.errors import TrainingError, remedy

# The libraries whose objects open no file later; files and datasets, which may, are left out.
_LIBRARIES = {*sys.stdlib_module_names, "numpy", "pandas", "pyarrow", "torch", "torchvision", "harness"} - {"io", "_io"}
_PASSES = 2  # over an epoch without counting a step, until a loop is taken for endless

log = logging.getLogger("harness")


class StoppedWaiting(Exception):
    """The rank was asked to stop while it waited for a batch."""


@dataclass(frozen=True)
class BatchRequest:
    """Rows for a worker to load. ``epoch`` is None in evaluation."""

    rows: np.ndarray
    epoch: int | None


class _Requests(Sampler[Any]):
    """The pending requests. One loader serves all epochs, so its workers are started once."""

    def __init__(self) -> None:
        self.pending: Iterable[BatchRequest] = ()

    def __iter__(self) -> Iterator[BatchRequest]:
        return iter(self.pending)


class _Fetch(torch.utils.data.Dataset[Any]):
    """A batch per request. In a worker an exception is returned in its place."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self._starved_s = 0.0

    def __getitem__(self, request: BatchRequest) -> Batch | PickledResult:
        if get_worker_info() is None:
            try:
                return self._batch(request)
            except StopIteration as error:  # which would end the epoch
                raise RuntimeError("the dataset raised StopIteration") from error
        try:
            return pickle_result(self._batch(request))
        except (SystemExit, KeyboardInterrupt) as error:
            what = f"the dataset raised {type(error).__name__} ({error}) in a loader worker"
            ended = TrainingError(what, hint="raise an ordinary exception, such as ValueError, instead")
            return pickle_result(LoadError.of(ended))
        except Exception as error:
            return pickle_result(LoadError.of(error))

    def _batch(self, request: BatchRequest) -> Batch:
        start, on_core = time.perf_counter(), time.thread_time()
        batch = read(self.dataset, request.rows, request.epoch)
        batch.spent_s = {name: batch.spent_s[name] for name in STAGES if name in batch.spent_s}  # a dataset may add any
        batch.spent_s |= {"load": time.perf_counter() - start, "cpu": time.thread_time() - on_core}
        if get_worker_info() is not None:  # the training process samples its own
            before, self._starved_s = self._starved_s, run_queue_s()
            batch.spent_s["load_starved"] = self._starved_s - before
        return batch


class Loader:
    """Batches of ``dataset``, fetched by ``num_workers`` processes and moved to ``device``."""

    def __init__(
        self,
        dataset: Dataset,
        num_workers: int,
        device: torch.device,
        timeout_s: float = math.inf,
        leave: Callable[[], bool] = lambda: False,
        reading: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext(),
    ) -> None:
        """Workers that deliver nothing for ``timeout_s`` are an error. Meanwhile, ``leave`` is called twice per second:
        it returns whether to end the wait. Without workers, each batch is read within ``reading(what is read)``."""
        self.dataset, self.device = dataset, device
        self.wait_s = 0.0  # time that training waited for data
        self.spent_s: dict[str, float] = {}  # time that loading took, by stage, in this process or in workers
        self._timeout_s, self._leave, self._since = timeout_s, leave, 0.0
        self._reading = reading
        self._blocked = False  # the last wait ended without a batch
        self._kind: tuple[Any, ...] = ()  # of the last batch
        self._mixed = False  # batches were of several kinds
        self._requests = _Requests()
        self._loader = WatchedDataLoader(
            _Fetch(dataset),
            sampler=self._requests,
            batch_size=None,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            prefetch_factor=PREFETCH if num_workers else None,
            worker_init_fn=in_loader_worker,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # without its own, starting an epoch would advance the training stream
        )
        self._loader.while_waiting = self._while_waiting

    def fetch(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """Yield the batches of ``requests``, in order, on the device.

        Raises the errors of the dataset, TrainingError if a worker died or delivers nothing, and StoppedWaiting.
        """
        loaded = self._loaded(requests)
        if self.device.type == "cuda" and self._loader.num_workers:  # a batch that is loaded here is never early
            return copied_ahead(loaded, self.device)
        return (batch.to(self.device) for batch in loaded)

    def _loaded(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """Yield the batches of ``requests`` on the host, pinned for a CUDA device."""
        self._requests.pending = requests
        batches: Iterator[Any] | None = None
        here = not self._loader.num_workers
        while True:
            start = self._since = time.perf_counter()
            try:
                batches = iter(self._loader) if batches is None else batches
                with self._reading("reading a batch of the dataset") if here else nullcontext():
                    batch = next(batches, None)
            except (RuntimeError, OSError, EOFError) as error:
                if failure := self._failure_of_workers(error):
                    raise failure from None
                raise
            self.wait_s += time.perf_counter() - start
            self._blocked = False
            if batch is None:
                return
            if isinstance(batch, LoadError):
                batch.reraise()
            self.spent_s |= {name: self.spent_s.get(name, 0.0) + value for name, value in batch.spent_s.items()}
            self._notice_kind(batch)
            yield batch

    def _failure_of_workers(self, error: Exception) -> TrainingError | None:
        """Return what ``error``, raised in place of a batch, says about the workers; None if nothing."""
        workers = getattr(self._loader._iterator, "_workers", ())
        try:
            death = worker_death(error, workers)
        except RuntimeError as signalled:  # by torch's handler for dead workers, which runs at any place
            death = worker_death(signalled, workers)
        is_cut_off = self._loader.num_workers and (isinstance(error, EOFError) or "ancdata" in str(error))
        if death or not is_cut_off:
            return death
        full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # received with too few file descriptors
        message = f"a batch could not be received from a loader worker: {full.strerror}"
        return TrainingError(message, hint=remedy(full))

    def _notice_kind(self, batch: Batch) -> None:
        """Warn, once, of a batch with another dtype, or images of another size, than the batches before: many models
        accept it, and learn something else. Texts of other lengths are usual."""
        if self._mixed or not len(batch):
            return
        inputs = batch.inputs
        rows = tuple(inputs.shape[1:]) if inputs.dim() == 4 else f"{inputs.dim() - 1} dimensions"
        kind = (rows, inputs.dtype, batch.targets.dtype)
        if not self._kind and torch.float64 in kind:
            _warn_of_float64("inputs" if inputs.dtype == torch.float64 else "targets")
        if self._kind and kind != self._kind:
            self._mixed = True
            text = "the dataset returned a batch with rows of %s, %s, and targets of %s; before, it had %s, %s and %s"
            log.warning(text, *kind, *self._kind)
        self._kind = kind

    def _while_waiting(self) -> None:
        self._blocked = True
        waited_s = time.perf_counter() - self._since
        if self._leave():
            raise StoppedWaiting
        if waited_s > self._timeout_s:
            raise TrainingError(
                f"the loader workers delivered no batch for {self._timeout_s:g} s (runtime.timeout_s)",
                hint="likely causes: a slow or unreachable disk, a dataset that waits for a lock or the network, or "
                "batches that take longer than that; py-spy dump --pid PID shows where a worker is. Raise "
                "runtime.timeout_s if loading is merely slow, or set data.num_workers=0 to see the dataset's own error",
            )

    def take_times(self) -> tuple[float, dict[str, float]]:
        """Return (seconds that training waited for data, those that loading took by stage) since the last call."""
        taken = self.wait_s, self.spent_s
        self.wait_s, self.spent_s = 0.0, {}
        return taken

    def close(self) -> None:
        """End the worker processes."""
        iterator: Any = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            if self._blocked:
                iterator.kill_workers()
            iterator._shutdown_workers()
            self._loader._iterator = None


@functools.cache  # once for both splits
def _warn_of_float64(what: str) -> None:
    log.warning(
        "the dataset returns %s of torch.float64: they take twice the memory, and what is computed from them in "
        "float64 is slow on a GPU and rounded differently; return float32",
        what,
    )


@dataclass
class MicroBatch:
    """The rows of one forward and backward pass."""

    batch: Batch
    weight: float
    """Factor of the mean loss, so that the sum over micro-batches, averaged over ranks, is the mean over all rows of
    the step."""
    rows: np.ndarray
    """Numbers of the rows of this step that are in the batch, each once: no repeated row, no replacement."""
    num_rows: int
    """How many rows of the batch count; with 0, the pass only takes part in communication."""
    rank: int
    """The rank of the recipe that it belongs to."""
    ends: bool
    """Whether it is that rank's last of the step."""

    @classmethod
    def of(cls, batch: Batch, planned: Part, scale: float) -> MicroBatch:
        as_planned = len(batch.rows) == len(planned.rows) and not batch.bad
        rows = batch.rows if as_planned else np.intersect1d(batch.rows, planned.rows)
        return cls(batch, len(planned.rows) * scale, rows, len(planned.rows), planned.rank, planned.ends)


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
    """The training rows of one process, in groups: the micro-batches of one optimizer step. It computes ``ranks`` of
    ``num_ranks`` ranks: usually one, several of parallel.logical_ranks."""

    loader: Loader
    rule: Rule
    ranks: range
    num_ranks: int
    per_rank: int
    accumulate: int
    seed: int
    tail: Literal["use", "drop"] = "use"
    batch_norm_spans_ranks: bool = False
    """Whether batch norms compute with the rows of all ranks, so that a rank may have a single one."""
    _passed: list[tuple[Sequence[Segment], tuple[int, int]]] = field(default_factory=list)
    """The last times that ``groups`` came to the end of an epoch: from which list, epoch and step."""

    @property
    def num_rows(self) -> int:
        return len(self.loader.dataset)

    def steps_per_epoch(self) -> int:
        return num_steps(self.num_rows, self.num_ranks, self.per_rank, self.tail)

    def steps_left(self, segments: Sequence[Segment], by: Segment | None = None) -> int:
        """Return the number of steps of an epoch after ``segments``, taken by the ranks of ``by``, by default by the
        current ones: the same on every rank."""
        left = self.num_rows - sum(self._rows_of(segments))
        ranks = by or self
        return num_steps(left, ranks.num_ranks, ranks.per_rank, self.tail)

    def advance(self, segments: list[Segment]) -> None:
        """Add one step by the current ranks to ``segments``, in place."""
        if not segments or not self._ours(segments[-1]):
            segments.append(Segment(self.num_ranks, self.per_rank, 0))
        segments[-1].steps += 1

    def _ours(self, segment: Segment) -> bool:
        return segment.num_ranks == self.num_ranks and segment.per_rank == self.per_rank

    def groups(self, epoch: int, segments: Sequence[Segment]) -> Iterator[list[MicroBatch]]:
        """Yield the groups of ``epoch`` after ``segments``: the same number on every rank, fewer only if the loader's
        ``leave`` ended a wait. Raises TrainingError if the list ``segments`` comes back unchanged again and again."""
        position = epoch, sum(segment.steps for segment in segments)
        passes = sum(before is segments and at == position for before, at in self._passed)
        if passes == _PASSES:
            raise TrainingError(
                f"all groups of epoch {epoch + 1} have been used {_PASSES} times, and none was counted: this loop "
                "would never end",
                hint="in your loop, call run.train_data.advance(run.state.segments) after each step, and "
                "run.state.next_epoch() after the last one",
            )
        done, first = list(segments), 0
        if done and self._ours(done[-1]):
            first = done.pop().steps  # the current ranks continue the last segment with the same assignment
        num_left = self.num_rows - sum(self._rows_of(done))
        shards = {
            rank: shard(self.rule, self.num_rows, rank, self.num_ranks, epoch, self.seed, done) for rank in self.ranks
        }
        steps = range(first, num_steps(num_left, self.num_ranks, self.per_rank, self.tail))
        fillers = {rank: rows[:1] if len(rows) else np.zeros(1, np.int64) for rank, rows in shards.items()}
        requests = (
            BatchRequest(
                self._at_least_two(part.rows if len(part.rows) else fillers[part.rank], num_left, step, part), epoch
            )
            for step in steps
            for part in self._micro_batches(shards, num_left, step)
        )
        batches = self.loader.fetch(requests)
        for step in steps:
            scale = self.num_ranks / num_rows_in_step(num_left, self.num_ranks, self.per_rank, step)
            parts = self._micro_batches(shards, num_left, step)
            try:
                group = list(itertools.islice(batches, len(parts)))
            except StoppedWaiting:
                return
            yield [MicroBatch.of(batch, part, scale) for part, batch in zip(parts, group, strict=True)]
        self._passed[:] = [(segments, position), *self._passed][:_PASSES]

    def _micro_batches(self, shards: Mapping[int, RowOrder], num_left: int, step: int) -> list[Part]:
        """Return the rows of this process in ``step``, in the same number of parts on every rank.

        In the tail, parts are uneven and may be empty. All ranks must run the same number of backward passes, so the
        caller fills an empty part with a row of weight zero.
        """
        first = step * self.per_rank
        longest = min(self.per_rank, -(-num_left // self.num_ranks) - first)
        num_parts = -(-longest // (self.per_rank // self.accumulate))
        return [
            Part(rank, rows, number, num_parts)
            for rank, order in shards.items()
            for number, rows in enumerate(np.array_split(order[first : first + self.per_rank], num_parts))
        ]

    def _at_least_two(self, rows: np.ndarray, num_left: int, step: int, part: Part) -> np.ndarray:
        """Repeat a single row if batch norm, which rejects one row, would see no other. The mean loss is unchanged."""
        if len(rows) != 1 or (self.batch_norm_spans_ranks and self._rows_of_all(num_left, step, part) > 1):
            return rows
        return np.repeat(rows, 2)

    def _rows_of_all(self, num_left: int, step: int, part: Part) -> int:
        """Return the number of rows in the micro-batch ``part.number`` of ``step`` over all ranks."""
        short, num_long = divmod(num_left, self.num_ranks)

        def rows(length: int) -> int:
            whole, rest = divmod(min(max(length - step * self.per_rank, 0), self.per_rank), part.num)
            return whole + (part.number < rest)

        return num_long * rows(short + 1) + (self.num_ranks - num_long) * rows(short)

    def any_inputs(self) -> torch.Tensor:
        """Return the inputs of one row, on the device, for a pass that does not count."""
        return read(self.loader.dataset, np.zeros(1, np.int64), 0).to(self.loader.device).inputs

    def _rows_of(self, segments: Sequence[Segment]) -> Iterator[int]:
        """Yield the number of rows in each segment, over all ranks."""
        left = self.num_rows
        for segment in segments:
            rows = num_rows_used(left, segment)
            left -= rows
            yield rows


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
        """Yield (rank, batch) ``num_turns`` times, rank by rank; None in place of a batch that another process has."""
        asked = {rank: [*self._requests(rank)] for rank in self.ranks}
        batches = self.loader.fetch(BatchRequest(rows, None) for of_rank in asked.values() for rows in of_rank)
        for rank, requests in asked.items():
            for _ in requests:
                yield rank, next(batches, None)
        while True:
            yield self.ranks.start, None

    def first(self) -> Batch | None:
        """Return the first batch of this process, on the device; None if it has no rows, or if training is to stop.

        A file that the dataset opens at its first use is not for loader workers, which are forked later. So a copy of
        the dataset reads; or a worker, if the dataset holds an object of the user's own, which might open one, too.
        """
        dataset, rows = self.loader.dataset, next(self._requests(self.ranks.start), None)
        if rows is None:
            return None
        parts = vars(dataset).values() if hasattr(dataset, "__dict__") else ()
        if all(map(_opens_no_file, parts)):
            return read(copy.copy(dataset), rows, None).to(self.loader.device)
        try:
            (batch,) = self.loader.fetch([BatchRequest(rows, None)])
        except StoppedWaiting:
            return None
        self.loader.take_times()  # which are those of evaluations
        return batch

    def _requests(self, rank: int) -> Iterator[np.ndarray]:
        start, stop = bounds(self.num_rows, rank, self.num_ranks)
        for edge in range(start, stop, self.batch_size):
            yield np.arange(edge, min(edge + self.batch_size, stop))


def _opens_no_file(part: object) -> bool:
    """Return True for data of a library; False for an object of the user's own, and for a dataset, which may hold one.
    Of a container the first members count."""
    kind = type(part).__module__
    members = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
    return (
        kind.partition(".")[0] in _LIBRARIES
        and not kind.startswith("torch.utils.data")
        and all(map(_opens_no_file, itertools.islice(members, 8)))
    )
