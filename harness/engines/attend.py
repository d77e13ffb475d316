"""Following what was started, while signals to this process ask it to stop."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

from harness.engines.job import Outcome, Started

_POLL_S = 0.1


def attend(started: Started, stopping: str = "stopping") -> Outcome:
    """Follow ``started`` to its end; a signal stops it, a second one ends it at once. ``stopping`` is what to say."""
    with _signals() as asked, ThreadPoolExecutor(1, "harness-follow") as pool:
        following = pool.submit(started.follow)
        while not following.done():
            if asked.wait(_POLL_S):
                asked.clear()
                print(stopping, file=sys.stderr)
                started.stop()
        return following.result()


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP set while the body runs."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # only the main thread may set handlers; whoever runs us in another one has ways of its own
        return

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
