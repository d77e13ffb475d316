"""Stopping early, together: a signal sets a flag, and all ranks agree on the step at which it is obeyed.

The question is asked asynchronously, some steps apart, and read a step later, so it costs no waiting; a rank that was
not signalled stops at the same step as the one that was.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from harness.distributed.runtime import Runtime

PERIOD_S = 0.5  # between two questions whether anybody wants to stop
_AHEAD = signal.SIGUSR1  # what a scheduler sends ahead of its limit, once; harness.cli holds it back until here
_SIGNALS = (signal.SIGTERM, signal.SIGINT, _AHEAD)


class Stop:
    """Whether to stop: ``request`` it from anywhere; ``agreed`` at a step's edge, by every rank, gives the verdict."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._asked: Callable[[], list[int]] | None = None
        self._pause = 0  # calls until the next question; the same on every rank
        self._calls, self._since = 0, time.monotonic()
        self.reason = ""
        self.verdict = False

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason

    def agreed(self) -> bool:
        """True from the call on at which all ranks know of a request. All ranks call it equally often.

        Several ranks ask about twice a second: every answer carries how many calls to wait with the next question, by
        rank 0's clock. An answer is read one call after its question, when it has long arrived.
        """
        if self._runtime.world_size == 1:
            self.verdict = self.verdict or bool(self.reason)
        elif not self.verdict:
            self._calls += 1
            if self._asked is not None:
                requested, self._pause = self._asked()
                self.verdict, self._asked = bool(requested), None
            elif self._pause > 0:
                self._pause -= 1
            else:
                self._asked = self._runtime.max_async([bool(self.reason), self._next_pause()])
        return self.verdict

    def settle(self) -> bool:
        """The verdict with every request so far counted, waiting for it. Collective; for edges that are rare."""
        if not self.verdict:
            earlier = self._asked()[0] if self._asked is not None else 0
            self._asked = None
            requested, self._pause = self._runtime.max_async([bool(self.reason), 0])()
            self.verdict = bool(requested or earlier)
            self._calls, self._since = 0, time.monotonic()  # what comes next may be faster or slower
        return self.verdict

    def _next_pause(self) -> int:
        """Calls in half a second at the present pace; at most four times as many as since the last question."""
        now = time.monotonic()
        calls, elapsed = self._calls, max(now - self._since, 1e-6)
        self._calls, self._since = 0, now
        return min(int(calls * PERIOD_S / elapsed), 4 * calls) if self._runtime.rank == 0 else 0


@contextmanager
def on_signals(stop: Stop) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGUSR1 request a stop while the body runs; what was before is put back after it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; whoever runs us in another one stops us by other means
        return

    def handle(number: int, frame: FrameType | None) -> None:
        stop.request(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {_AHEAD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
