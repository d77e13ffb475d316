"""A thread beside training that ends a rank which would otherwise wait for the dead.

A rank blocked in a collective cannot see that a peer failed (nccl waits for its whole time-out) or that its launcher
was killed. The failing rank leaves a mark in the launch's key-value store, which each rank's watch looks for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from harness.errors import EXIT_FAILURE
from harness.runtime import Runtime
from harness.stop import Stop

log = logging.getLogger("harness")

_KEY = "failed"
PERIOD_S = 1.0
GRACE_S = 12.0  # for the main thread to end by itself, with a checkpoint or a traceback


class Watch:
    """Watches peers (through ``runtime.store``) and, under torch's launcher, the parent process."""

    def __init__(self, runtime: Runtime, stop: Stop, leave: Callable[[int], None] = os._exit) -> None:
        self._runtime, self._stop, self._leave = runtime, stop, leave
        # A plain shell may end before its job does (nohup); only a launcher's death means that nobody supervises us.
        self._parent = os.getppid() if runtime.launch.elastic else None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="harness-watch", daemon=True)

    def __enter__(self) -> Watch:
        if self._runtime.store is not None or self._parent is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def report(self, rank: int) -> None:
        """Tell the peers that this rank failed. Never raises: the failure itself is what matters."""
        try:
            if self._runtime.store is not None:
                self._runtime.store.set(_KEY, str(rank))
        except Exception as error:  # the store went with the rank that hosted it
            log.debug("peers could not be told of the failure: %s", error)

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            if self._parent is not None and os.getppid() != self._parent:
                self._end("the launcher is gone")
                return
            if failed := self._peer_failure():
                self._end(failed)
                return

    def _peer_failure(self) -> str:
        if self._runtime.store is None:
            return ""
        try:
            if self._runtime.store.check([_KEY]):
                return f"rank {self._runtime.store.get(_KEY).decode()} failed"
        except Exception:
            return "rank 0, or the launcher, is gone"
        return ""

    def _end(self, reason: str) -> None:
        """Ask for a stop; if training cannot obey within the grace period, end the process."""
        self._stop.request(reason)
        if not self._ended.wait(GRACE_S):
            log.error("%s, and this rank is blocked waiting for it: ending", reason)
            logging.shutdown()
            time.sleep(0.1)
            self._leave(EXIT_FAILURE)
