"""Threads that compute on the device of the thread that starts them.

A new thread computes on ``cuda:0`` until it sets its device. On any other rank it would then synchronize a stream that
is not its own, and open a context on the first GPU. So the harness starts its threads here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Generic, TypeVar

Value = TypeVar("Value")


def thread(work: Callable[[], object], name: str) -> Thread:
    """Return a daemon thread for ``work``, not started yet, on the current device of the calling thread."""
    # Without torch there is no device. Asking for one before CUDA is in use would open a context.
    torch = sys.modules.get("torch")
    device = torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None

    def run() -> None:
        if torch is not None and device is not None:
            torch.cuda.set_device(device)
        work()

    return Thread(target=run, name=name, daemon=True)


class Background(Future[Value], Generic[Value]):
    """The result of ``work``, which a daemon thread computes: this process need not wait for it at its end."""

    def __init__(self, work: Callable[[], Value], name: str) -> None:
        super().__init__()
        self._work = work
        self.thread = thread(self._run, name)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.set_result(self._work())
        except BaseException as error:  # SystemExit, too: the waiting thread would never learn of it
            self.set_exception(error)
