"""What asks a process that has started others for their end: a terminal, a person, a scheduler."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """How often SIGINT, SIGTERM or SIGHUP came while the body runs; under nohup SIGHUP stays ignored."""
    asked: list[int] = []  # not an Event: to set one in a handler may wait for who is just looking at it

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread may set handlers; whoever runs us in another one has ways of its own
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield lambda: len(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
