"""Stopping early, together: a signal sets a flag, and all ranks agree on the step at which it is obeyed.

The agreement of one step is asked for asynchronously and read a step later, so it costs no waiting; a rank that was
not signalled stops at the same step as the one that was.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from harness.runtime import Runtime


class Stop:
    """Whether to stop: ``request`` it from anywhere; ``agreed`` at a step's edge, by every rank, gives the verdict."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._asked: Callable[[], bool] | None = None
        self.reason = ""
        self.verdict = False

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason

    def agreed(self) -> bool:
        """True from the step on at which all ranks know of a request. Collective; does not wait for this step's."""
        if not self.verdict:
            answer, self._asked = self._asked, self._runtime.flag_async(bool(self.reason))
            self.verdict = answer() if answer is not None else False
        return self.verdict

    def settle(self) -> bool:
        """The verdict with every request so far counted, waiting for it. Collective; for edges that are rare."""
        if not self.verdict:
            earlier = self._asked() if self._asked is not None else False
            self._asked = None
            self.verdict = self._runtime.flag_async(bool(self.reason))() or earlier
        return self.verdict


@contextmanager
def on_signals(stop: Stop) -> Iterator[None]:
    """SIGTERM and SIGINT request a stop while the body runs; the handlers before are put back after it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; whoever runs us in another one stops us by other means
        return

    def handle(number: int, frame: FrameType | None) -> None:
        stop.request(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def in_loader_worker(_: int) -> None:
    """Signal rules of a loader process: only its parent ends it.

    Launchers and schedulers signal every process of a rank. A loader that died of it would fail the rank, which is
    about to write its checkpoint; so Ctrl-C is ignored, and SIGTERM too unless it comes from the parent. A parent that
    was killed takes it along within a second: until then it holds the parent's connections open, and no peer notices.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # elsewhere a signal's sender is not told
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with, args=(os.getppid(),), name="harness-signals", daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, 0.5)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
