"""What the parts of a training step take: marks at their edges, none of which makes the host wait for the device.

What a window of steps is, and what ranks add up, lives in ``harness.training.progress``.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

# Parts of a step, in its order. ``reduce`` is what of the messages between ranks stands behind the backward pass.
PHASES = ("forward", "backward", "reduce", "optimizer")

_READ_AT = 256  # marks; from there on those that the device has passed are read as new ones come


class Clock(Protocol):
    """Marks on the way through a step: ``start``, then ``end`` of one phase after the other."""

    spent_s: dict[str, float]  # seconds of each of PHASES, up to the last ``settle``

    def start(self) -> None:
        """A step begins; the time since the last mark belongs to no phase."""

    def end(self, phase: str) -> None:
        """The time since the last mark was that of ``phase``."""

    def settle(self) -> None:
        """Bring ``spent_s`` up to the last mark. The host waits for the device."""


class HostClock:
    """Where calls return when their work is done."""

    def __init__(self) -> None:
        self.spent_s = dict.fromkeys(PHASES, 0.0)
        self._mark = 0.0

    def start(self) -> None:
        self._mark = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.spent_s[phase] += now - self._mark
        self._mark = now

    def settle(self) -> None:
        pass


class DeviceClock:
    """Where calls only queue work: the marks are events in the stream of a CUDA device.

    Events are used again once they are read. The host runs ahead of the device by as much as the driver's queue of
    launches holds, so only so many can be on their way.
    """

    def __init__(self, device: torch.device) -> None:
        self.spent_s = dict.fromkeys(PHASES, 0.0)
        self._device = device
        self._free: list[Any] = []
        self._ahead: deque[tuple[str, Any]] = deque()  # (phase that ends there, event), not read yet

    def start(self) -> None:
        self.end("")

    def end(self, phase: str) -> None:
        if len(self._ahead) >= _READ_AT:
            self._read()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._ahead.append((phase, event))

    def settle(self) -> None:
        if self._ahead:
            self._ahead[-1][1].synchronize()
            self._read()

    def _read(self) -> None:
        """Book what the device has passed. Waits for nothing."""
        while len(self._ahead) > 1 and self._ahead[1][1].query():
            _, before = self._ahead.popleft()
            phase, event = self._ahead[0]
            if phase:
                self.spent_s[phase] += before.elapsed_time(event) / 1000
            self._free.append(before)


def clock(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()


def end_with_local_work(clock: Clock, loss: Tensor) -> None:
    """Mark the end of backward where ``loss.backward()`` has no more gradients to compute, before what waits for other
    ranks. Call before that backward pass.

    Wrappers that exchange gradients (Apex's and ours, FSDP) finish in callbacks that autograd runs after the pass, in
    the order in which they were queued. The loss is the first tensor of a pass, so this one is in front of theirs.
    """

    def first(_: Tensor) -> None:
        Variable._execution_engine.queue_callback(lambda: clock.end("backward"))

    loss.register_hook(first)
