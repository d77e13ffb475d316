"""A thread that ends this rank when it would otherwise wait for a process that is gone.

A rank blocked in a collective cannot see that a peer failed (nccl waits for its whole timeout) or that its launcher was
killed. A failing rank therefore puts its RankExit into the launch's key-value store, where every watchdog looks for it.
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

from harness.distributed import stack
from harness.distributed.launch_env import Launch
from harness.distributed.rank_exit import Cause, RankExit
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import EXIT_FAILURE

log = logging.getLogger("harness")

_KEY = "failed"
PERIOD_S = 1.0
GRACE_S = 12.0  # for the main thread to end by itself, with a checkpoint or a traceback
JOIN_S = 5.0  # for the thread to return from a request to the store
NEWS_S = 3.0  # for all ranks to learn of a failure before the failing one closes its connections


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
                log.error("the launcher is gone before all ranks had met: exiting")
                exit_process(EXIT_FAILURE)
                return
            finished.wait(PERIOD_S)

    if launch.supervised:
        threading.Thread(target=run, name="harness-orphan", daemon=True).start()
    try:
        yield
    finally:
        finished.set()


class Watchdog:
    """Watches the peers, through ``runtime.store``, and the launcher, which is the parent process of a supervised rank.

    When one of them is gone it requests a stop. If training cannot stop within GRACE_S, it ends the process.
    """

    def __init__(
        self,
        runtime: Runtime,
        stop: Stop,
        *,
        parent: int | None = None,
        on_blocked: Callable[[Cause, str, str], None] = lambda cause, message, doing: None,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """``parent``: the process that started this one, as seen at its start; it may have died since.
        ``on_blocked(cause, message, doing)`` is called before a blocked rank is ended."""
        self._runtime, self._stop = runtime, stop
        self._on_blocked, self._exit_process = on_blocked, exit_process
        # A shell may end before its job does (nohup). Only a launcher's death leaves the rank without supervision.
        self._parent = (parent or os.getppid()) if runtime.launch.supervised else None
        self.doing = ""  # where the main thread was when this rank learned of another's failure
        self._first: RankExit | None = None  # the launch's first failure, once this rank has learned of it
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="harness-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._runtime.store is not None or self._parent is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        # Python stops daemon threads at exit, also inside a C++ call of the store, which then aborts the process.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def report(self, failure: RankExit) -> RankExit | None:
        """Publish ``failure`` and return the launch's first one: this, or an earlier one of a peer. None if the store
        is gone or there is none. Never raises, so that the failure itself gets reported."""
        with suppress(Exception):
            if self._runtime.store is not None and self._first is None:
                first = self._runtime.store.compare_set(_KEY, "", failure.to_json())
                self._first = RankExit.from_dict(json.loads(first))
        self.acknowledge()
        return self._first

    def acknowledge(self) -> None:
        """Publish that this rank has seen the failure."""
        with suppress(Exception):
            if self._runtime.store is not None:
                self._runtime.store.set(f"heard/{self._runtime.rank}", "")

    def linger(self) -> None:
        """Wait until all peers have seen the failure, at most NEWS_S: the store or the launcher may end with this
        rank."""
        with suppress(Exception):
            if self._runtime.store is not None:
                keys = [f"heard/{rank}" for rank in range(self._runtime.world_size)]
                self._runtime.store.wait(keys, timedelta(seconds=NEWS_S))

    def _run(self) -> None:
        while not self._finished.wait(PERIOD_S):
            if self._parent is not None and os.getppid() != self._parent:
                self._end(Cause.LAUNCHER_LOST, "the launcher is gone")
                return
            if message := self._peer_failure():
                self._end(Cause.PEER_LOST, message)
                return

    def _peer_failure(self) -> str:
        store = self._runtime.store
        if store is None:
            return ""
        try:
            if not store.check([_KEY]):
                return ""
            self._first = RankExit.from_dict(json.loads(store.get(_KEY)))
        except Exception:
            self.doing = stack.main_thread_at()
            return "rank 0, or the launcher, is gone"
        self.doing = stack.main_thread_at()
        self.acknowledge()
        return f"rank {self._first.rank} failed"

    def _end(self, cause: Cause, message: str) -> None:
        self._stop.request(message)
        if not self._finished.wait(GRACE_S):
            log.error("%s, and this rank is blocked waiting for it: exiting", message)
            self._on_blocked(cause, message, self.doing or stack.main_thread_at())
            logging.shutdown()
            time.sleep(0.1)
            self._exit_process(EXIT_FAILURE)
