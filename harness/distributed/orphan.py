"""The end of a process whose launcher dies before the ranks have met: later, the watchdog notices it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from harness.distributed.launch_env import Launch
from harness.distributed.threads import thread
from harness.errors import EXIT_FAILURE

log = logging.getLogger("harness")

PERIOD_S = 1.0


@contextmanager
def exits_without_launcher(
    launch: Launch, parent: int | None = None, exit_process: Callable[[int], None] = os._exit
) -> Iterator[None]:
    """End this process at once if its launcher dies while the body runs. For the time before rendezvous, which may take
    minutes: there is nothing to save yet, and no peer to inform."""
    finished = threading.Event()
    launcher = parent or os.getppid()

    def run() -> None:
        while not finished.is_set():
            if os.getppid() != launcher:
                log.error("the launcher exited before all ranks had connected: exiting")
                exit_process(EXIT_FAILURE)
                return
            finished.wait(PERIOD_S)

    if launch.supervised:
        thread(run, "harness-orphan").start()
    try:
        yield
    finally:
        finished.set()
