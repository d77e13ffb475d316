"""A thread beside training that ends a rank which would otherwise wait for the dead.

A rank blocked in a collective cannot see that a peer failed (nccl waits for its whole time-out) or that its launcher
was killed. The failing rank leaves a mark in the launch's key-value store, which each rank's watch looks for.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from harness.distributed import stack
from harness.distributed.launch_env import Launch
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import EXIT_FAILURE

log = logging.getLogger("harness")

_KEY = "failed"
PERIOD_S = 1.0
GRACE_S = 12.0  # for the main thread to end by itself, with a checkpoint or a traceback
JOIN_S = 5.0  # for the thread to come back from a question to the store
NEWS_S = 3.0  # for the news of a failure to reach all ranks, before the one that failed takes its connections along


@contextmanager
def unless_orphaned(
    launch: Launch, parent: int | None = None, leave: Callable[[int], None] = os._exit
) -> Iterator[None]:
    """Until the ranks have met, which may take long: end this process at once when its launcher dies. There is nothing
    to save yet, and nobody to tell."""
    met = threading.Event()
    launcher = parent or os.getppid()

    def run() -> None:
        while not met.is_set():
            if os.getppid() != launcher:
                log.error("the launcher is gone before all ranks had met: ending")
                leave(EXIT_FAILURE)
                return
            met.wait(PERIOD_S)

    if launch.supervised:
        threading.Thread(target=run, name="harness-orphan", daemon=True).start()
    try:
        yield
    finally:
        met.set()


class Watch:
    """Watches peers (through ``runtime.store``) and the launcher, where there is one: the parent process."""

    def __init__(
        self,
        runtime: Runtime,
        stop: Stop,
        leave: Callable[[int], None] = os._exit,
        parent: int | None = None,
        last_words: Callable[[str, str], None] = lambda doing, reason: None,
    ) -> None:
        """``parent``: the process that started this one, as it was at the start; it may have died since.
        ``last_words(doing, reason)`` is called before a blocked rank is ended."""
        self._runtime, self._stop, self._leave, self._last_words = runtime, stop, leave, last_words
        # A plain shell may end before its job does (nohup); only a launcher's death means that nobody supervises us.
        self._parent = (parent or os.getppid()) if runtime.launch.supervised else None
        self.doing = ""  # where the main thread was when this rank heard of another's failure
        self._first: dict[str, Any] | None = None  # the launch's first failure, once this rank has heard of it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="harness-watch", daemon=True)

    def __enter__(self) -> Watch:
        if self._runtime.store is not None or self._parent is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        # A thread that Python finds alive at its end may be torn out of a C++ call, which aborts the process.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def report(self, failure: dict[str, Any]) -> dict[str, Any] | None:
        """Tell the peers of ``failure`` (of JSON types); return the launch's first, which is this one if none was
        before, or None if nobody can be told. Never raises: the failure itself is what matters."""
        with suppress(Exception):  # the store went with the rank that hosted it
            if self._runtime.store is not None and self._first is None:
                self._first = json.loads(self._runtime.store.compare_set(_KEY, "", json.dumps(failure)))
        self.acknowledge()
        return self._first

    def acknowledge(self) -> None:
        """Say that this rank knows of the failure, by whatever way."""
        with suppress(Exception):
            if self._runtime.store is not None:
                self._runtime.store.set(f"heard/{self._runtime.rank}", "")

    def linger(self) -> None:
        """Stay until all peers know of the failure, or a moment: the store, or the launcher, may end with this rank."""
        with suppress(Exception):
            if self._runtime.store is not None:
                heard = [f"heard/{rank}" for rank in range(self._runtime.world_size)]
                self._runtime.store.wait(heard, timedelta(seconds=NEWS_S))

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            if self._parent is not None and os.getppid() != self._parent:
                self._end("the launcher is gone")
                return
            if failed := self._peer_failure():
                self._end(failed)
                return

    def _peer_failure(self) -> str:
        store = self._runtime.store
        if store is None:
            return ""
        try:
            if not store.check([_KEY]):
                return ""
            self._first = json.loads(store.get(_KEY))
        except Exception:
            self.doing = stack.main_thread_at()
            return "rank 0, or the launcher, is gone"
        self.doing = stack.main_thread_at()
        self.acknowledge()
        return f"rank {self._first['rank']} failed"

    def _end(self, reason: str) -> None:
        """Ask for a stop; if training cannot obey within the grace period, end the process."""
        self._stop.request(reason)
        if not self._ended.wait(GRACE_S):
            log.error("%s, and this rank is blocked waiting for it: ending", reason)
            self._last_words(self.doing or stack.main_thread_at(), reason)
            logging.shutdown()
            time.sleep(0.1)
            self._leave(EXIT_FAILURE)
