"""The times of the phases of a step: by the clock of the host, or by events in the stream of a CUDA device."""

from __future__ import annotations

import time
from collections import deque

import torch
from torch import Tensor
from torch.autograd import Variable

# The phases of a step, in order. ``reduce`` is the part of the gradient exchange that follows the backward pass.
PHASES = ("forward", "backward", "reduce", "optimizer")

_READ_AT = 256  # events in flight, from which on those that the device has passed are read


class StepTimer:
    """Marks in a step: ``start``, then ``end`` of one phase after the other. This one is for devices whose work is done
    when a call returns."""

    def __init__(self) -> None:
        self.spent_s = dict.fromkeys(PHASES, 0.0)  # seconds in each phase, up to the last ``settle``
        self._mark = 0.0

    def start(self) -> None:
        """Mark the start of a step. The time since the last mark belongs to no phase."""
        self._mark = time.perf_counter()

    def end(self, phase: str) -> None:
        """Add the time since the last mark to ``phase``."""
        now = time.perf_counter()
        self.spent_s[phase] += now - self._mark
        self._mark = now

    def end_window(self) -> None:
        """Let the next ``settle`` stop at the last mark, although further ones may follow before it."""

    def settle(self) -> None:
        """Bring ``spent_s`` up to the end of the window, or to the last mark. The host waits for the device to pass
        it."""


class CudaTimer(StepTimer):
    """For CUDA devices, whose calls only queue work: the marks are events in the stream.

    An event is reused once it is read. The driver's launch queue limits how far the host runs ahead of the device, and
    so the number of events.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._free: list[torch.cuda.Event] = []
        self._pending: deque[tuple[str, torch.cuda.Event]] = deque()  # (phase that ends there, event), not read yet
        self._window_end: torch.cuda.Event | None = None

    def start(self) -> None:
        self.end("")

    def end(self, phase: str) -> None:
        if len(self._pending) >= _READ_AT:
            self._read()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._pending.append((phase, event))

    def end_window(self) -> None:
        self._window_end = self._pending[-1][1] if self._pending else None

    def settle(self) -> None:
        if self._pending:
            wait_for_event(self._window_end or self._pending[-1][1])
            self._read()
        self._window_end = None

    def _read(self) -> None:
        """Add up the events of the window that the device has passed, without waiting."""
        while len(self._pending) > 1 and self._pending[1][1].query():
            if self._pending[0][1] is self._window_end:
                return
            _, before = self._pending.popleft()
            phase, event = self._pending[0]
            if phase:
                self.spent_s[phase] += before.elapsed_time(event) / 1000
            self._free.append(before)


def wait_for_event(event: torch.cuda.Event) -> None:
    """Wait until the device has passed ``event``."""
    if not event.query():
        event.synchronize()


def end_backward_before_exchange(timer: StepTimer, loss: Tensor) -> None:
    """Mark the end of "backward" when all local gradients are computed, before waiting for other ranks. Call this
    before ``loss.backward()``.

    Apex's DDP, ours and FSDP finish the exchange of gradients in callbacks that autograd runs after the backward pass,
    in the order in which they were queued. The loss is the first tensor of the pass, so this callback comes first.
    """

    def queue_first(_: Tensor) -> None:
        Variable._execution_engine.queue_callback(lambda: timer.end("backward"))  # as torch's own FSDP does

    loss.register_hook(queue_first)
