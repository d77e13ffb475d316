"""Streams, events and the current device of ``torch.cuda`` on the CPU, where all work is done when a call returns.

The current device and stream are per thread, as in CUDA.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import torch
from torch import Tensor

from harness.apex.call_counter import count_call

_current = threading.local()  # .device, .stream


def set_device(device: Any) -> None:
    """Set the device that ``current_device`` returns. A negative index does nothing."""
    index = _index(device)
    if index >= 0:
        _current.device = index


def current_device() -> int:
    """Return the index last set in this thread, 0 by default."""
    return getattr(_current, "device", 0)


def current_stream(device: Any = None) -> Stream:
    """Return the stream of the innermost ``with torch.cuda.stream(...)``."""
    return getattr(_current, "stream", None) or default_stream(device)


def default_stream(device: Any = None) -> Stream:
    """Return the stream of ``device`` that is current outside of any ``with``."""
    return _default_stream(_index(device))


@functools.cache
def _default_stream(index: int) -> Stream:
    return Stream()


def set_stream(stream: Any) -> None:
    """Make ``stream`` this thread's current stream; None changes nothing, as on CUDA."""
    if stream is not None:
        _current.stream = stream


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return current_device() if index is None else index


class DeviceContext:
    """Replaces ``torch.cuda.device`` and ``device_of``: sets the current device inside a ``with``."""

    def __init__(self, device: Any) -> None:
        count_call("torch.cuda.device")
        self.idx = -1 if isinstance(device, Tensor) else _index(device)

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        set_device(self.idx)

    def __exit__(self, *error: Any) -> None:
        set_device(self.prev_idx)


class Event:
    """An event that is complete as soon as it is recorded. ``elapsed_time`` uses the wall clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        count_call("torch.cuda.Event")
        self._time_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._time_s = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to ``end_event``."""
        return 1000 * (end_event._time_s - self._time_s)

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


class Stream:
    """A queue whose work is always done."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        count_call("torch.cuda.Stream")
        self.device = torch.device("cpu")
        self.priority = priority
        self._before: list[Stream | None] = []  # the streams that were current where it was entered

    def __enter__(self) -> Stream:
        self._before.append(getattr(_current, "stream", None))
        _current.stream = self
        return self

    def __exit__(self, *error: Any) -> None:
        _current.stream = self._before.pop()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event if event is not None else Event()
        event.record(self)
        return event

    def synchronize(self) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...


class StreamContext:
    """Replaces ``torch.cuda.stream``: sets the current stream inside a ``with``."""

    def __init__(self, stream: Any) -> None:
        count_call("torch.cuda.stream")
        self.stream = stream

    def __enter__(self) -> Any:
        self._before = getattr(_current, "stream", None)
        _current.stream = self.stream if self.stream is not None else self._before
        return self.stream

    def __exit__(self, *error: Any) -> None:
        _current.stream = self._before
