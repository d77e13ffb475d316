"""Counting the signals that ask a supervising process to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """A function that returns how many SIGINT, SIGTERM and SIGHUP have arrived since the body began.

    Under nohup SIGHUP stays ignored. Outside the main thread, where Python allows no handlers, the count stays 0.
    """
    received: list[int] = []  # a list: Event.set() in a handler deadlocks if the interrupted code holds its lock

    def count(number: int, frame: FrameType | None) -> None:
        received.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {number: signal.signal(number, count) for number in numbers}
    try:
        yield lambda: len(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
