"""The interface between a dataset and the loader: a dataset returns a ``Batch`` for the rows it is asked for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from harness.errors import OwnCodeError, place_of, plural

AHEAD = 2  # batches that are copied to a CUDA device before they are needed
STAGES = ("read", "decode", "transform")  # of loading, which a dataset may measure


@dataclass
class Batch:
    """Rows as a dataset returns them and the loader delivers them."""

    inputs: torch.Tensor
    """(batch, ...) as the dataset stores them."""
    targets: torch.Tensor
    """(batch, ...), usually int64 (batch,)."""
    rows: np.ndarray
    """(batch,) numbers of the rows that are really in the batch."""
    bad: list[int] = field(default_factory=list)
    """Numbers of the requested rows that could not be read."""
    spent_s: dict[str, float] = field(default_factory=dict)
    """Seconds in some of STAGES; the loader adds "load", the whole, and "cpu", the part on a core."""

    def __len__(self) -> int:
        return len(self.targets)

    def pin_memory(self) -> Batch:
        return replace(self, inputs=self.inputs.pin_memory(), targets=self.targets.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """Copy inputs and targets to ``device``; the copy is asynchronous if they are in pinned memory."""
        if device.type == "cpu":
            return self
        inputs, targets = (part.to(device, non_blocking=True) for part in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)


def copied_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield ``batches``, which are in pinned memory, on the CUDA device ``device``.

    While one is used, the next AHEAD are copied on a stream of their own, so neither the device nor the host waits for
    a copy. An error of ``batches`` is raised in its place, after the batches before it.
    """
    side = torch.cuda.Stream(device)
    ready: deque[tuple[Batch, torch.cuda.Event]] = deque()
    failed: Exception | None = None
    more = True
    while more or ready:
        while more and len(ready) <= AHEAD:
            try:
                batch = next(batches, None)
            except Exception as error:
                batch, failed = None, error
            if more := batch is not None:
                with torch.cuda.stream(side):
                    on_device, event = batch.to(device), torch.cuda.Event()
                    event.record(side)
                ready.append((on_device, event))
        if ready:
            batch, event = ready.popleft()
            stream = torch.cuda.current_stream(device)
            stream.wait_event(event)
            for part in (batch.inputs, batch.targets):
                part.record_stream(stream)  # its memory belongs to the other stream, which could reuse it too early
            yield batch
            del batch
    if failed is not None:
        raise failed


class StageClock:
    """Adds up the seconds of each stage of loading a batch."""

    def __init__(self) -> None:
        self.spent_s = dict.fromkeys(STAGES, 0.0)
        self._mark = time.perf_counter()

    def start(self) -> None:
        self._mark = time.perf_counter()

    def end(self, stage: str) -> None:
        now = time.perf_counter()
        self.spent_s[stage] += now - self._mark
        self._mark = now


class Dataset(Protocol):
    """All rows of a split. Which rank reads which rows, and in which order, is decided by the caller."""

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray, epoch: int | None) -> Batch:
        """Return the rows numbered ``rows`` (int64), in that order.

        ``epoch`` is None in evaluation. Random augmentation must depend on (seed, epoch, row) alone, because a resumed
        run and a run on other ranks ask for the same rows in other batches: see ``harness.data.seeds.row_seed``.
        """
        ...


@runtime_checkable
class SupportsFault(Protocol):
    """A dataset whose rows may be unreadable, such as images."""

    def fault(self, row: int) -> str:
        """Return why ``row`` cannot be read; empty if it can."""
        ...


def row_namer(dataset: object, otherwise: Callable[[int], str] = str) -> Callable[[int], str]:
    """Return the function from a row's number to its name in messages: ``dataset.row_name``, or else ``otherwise``."""
    namer: Callable[[int], str] = getattr(dataset, "row_name", otherwise)
    return namer


def read(dataset: Dataset, rows: np.ndarray, epoch: int | None) -> Batch:
    """Return these rows of ``dataset``. Raises OwnCodeError if its method returns anything but a Batch of tensors, or
    one whose parts differ in length, or that lacks rows without naming them as bad."""
    batch: object = dataset.batch(rows, epoch)
    hint = "return harness.training.task.Batch(inputs, targets, rows)"
    if isinstance(batch, Batch):
        kinds = [type(part).__name__ for part in (batch.inputs, batch.targets)]
        shapes = [tuple(np.shape(part)) for part in (batch.inputs, batch.targets, batch.rows)]
        if not all(isinstance(part, torch.Tensor) for part in (batch.inputs, batch.targets)):
            description = "a Batch with inputs of type {} and targets of type {}, not tensors".format(*kinds)
            hint += " with tensors, such as torch.from_numpy(inputs)"
        elif len({shape[:1] for shape in shapes}) > 1:
            description = "a Batch with inputs of shape {}, targets of shape {} and rows of shape {}".format(*shapes)
            hint += ", each with one entry for each row"
        elif not 0 <= len(rows) - len(batch.rows) <= len(batch.bad):
            description = f"a Batch of {plural(len(batch.rows), 'row')} where {len(rows)} were asked for"
            hint += " with each of them, in that order; list those that cannot be read as its bad=[...]"
        else:
            return batch
    else:
        description = f"{described(batch)}, not a Batch"
    where = place_of(type(dataset), "batch") or "task.name"
    raise OwnCodeError(f"{type(dataset).__name__}.batch() returned {description}", where=where, hint=hint)


def described(value: object) -> str:
    """Return the kind of ``value``, in words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
