"""An iterator that works ahead in a thread of its own, for work that leaves the interpreter free."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator
from typing import TypeVar

Item = TypeVar("Item")
_POLL_S = 0.1


def read_ahead(items: Generator[Item, None, None], depth: int = 4) -> Generator[Item, None, None]:
    """The same items and the same exception; at most ``depth`` of them wait in memory.

    Closing this generator, which an exception in the loop over it does too, closes ``items`` and ends the thread.
    """
    waiting: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: Item | None, error: BaseException | None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                waiting.put((item, error), timeout=_POLL_S)
                return

    def produce() -> None:
        try:
            with contextlib.closing(items):
                for item in items:
                    put(item, None)
                    if stop.is_set():
                        return
            put(None, StopIteration())
        except BaseException as error:  # noqa: B036  raised again where the items are wanted
            put(None, error)

    thread = threading.Thread(target=produce, name="read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = waiting.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()
