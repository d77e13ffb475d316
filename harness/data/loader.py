"""Batches of rows that are asked for, loaded by worker processes (loader_workers.py) and moved to the device."""

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

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
from harness.distributed.machine import run_queue_s
from harness.errors import TrainingError, remedy

# The libraries whose objects open no file later; files and datasets, which may, are left out.
_LIBRARIES = {*sys.stdlib_module_names, "numpy", "pandas", "pyarrow", "torch", "torchvision", "harness"} - {"io", "_io"}

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
            message = f"the dataset raised {type(error).__name__} ({error}) in a loader worker"
            ended = TrainingError(message, hint="raise an ordinary exception, such as ValueError, instead")
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
        in_this_process = not self._loader.num_workers
        while True:
            start = self._since = time.perf_counter()
            try:
                batches = iter(self._loader) if batches is None else batches
                with self._reading("reading a batch of the dataset") if in_this_process else nullcontext():
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

    def first(self, rows: np.ndarray) -> Batch | None:
        """Return the evaluation batch of ``rows``, on the device; None if training is to stop.

        A file that the dataset opens at its first use is not for loader workers, which are forked later. So a copy of
        the dataset reads; or a worker, if the dataset holds an object of the user's own, which might open one, too.
        """
        parts = vars(self.dataset).values() if hasattr(self.dataset, "__dict__") else ()
        if all(map(_opens_no_file, parts)):
            return read(copy.copy(self.dataset), rows, None).to(self.device)
        try:
            (batch,) = self.fetch([BatchRequest(rows, None)])
        except StoppedWaiting:
            return None
        self.take_times()  # which are those of evaluations
        return batch

    def take_times(self) -> tuple[float, dict[str, float]]:
        """Return (seconds that training waited for data, those that loading took by stage) since the last call."""
        times = self.wait_s, self.spent_s
        self.wait_s, self.spent_s = 0.0, {}
        return times

    def close(self) -> None:
        """End the worker processes."""
        iterator: Any = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            if self._blocked:
                iterator.kill_workers()
            iterator._shutdown_workers()
            self._loader._iterator = None


@functools.cache  # once for both splits
def _warn_of_float64(values: str) -> None:
    log.warning(
        "the dataset returns %s of torch.float64: they take twice the memory, and what is computed from them in "
        "float64 is slow on a GPU and rounded differently; return float32",
        values,
    )


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
