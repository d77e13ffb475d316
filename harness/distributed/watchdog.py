"""A thread that ends this rank when it would otherwise wait for a process that is gone, or alone and without an end.

A rank blocked in a collective cannot see that a peer failed (nccl waits for its whole timeout) or that its launcher was
killed. A failing rank therefore puts its RankExit into the launch's key-value store, where every watchdog looks for it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from harness.distributed import stack
from harness.distributed.heartbeat import Heartbeat
from harness.distributed.launch_env import Launch
from harness.distributed.rank_exit import Cause, RankExit
from harness.distributed.runtime import Runtime
from harness.distributed.stalls import ANSWER_S, Stalls
from harness.distributed.stop import Stop
from harness.distributed.store import StoreTimeout
from harness.distributed.threads import thread
from harness.errors import EXIT_FAILURE

log = logging.getLogger("harness")

_KEY = "failed"
_STOP = "stop"
PERIOD_S = 1.0
GRACE_S = 12.0  # for the main thread to end by itself, with a checkpoint or a traceback
JOIN_S = 1.0  # for the thread to return from a request to the store
STOP_GRACE_S = 5.0  # likewise, once another rank has stopped without a checkpoint
NEWS_S = 3.0  # for all ranks to be notified of a failure before the failing one closes its connections
_POLL_S = 0.1
_STORE_LOST = "rank 0, or the launcher, is gone"
_GRACES_S = {Cause.HUNG: NEWS_S, Cause.STOPPED: STOP_GRACE_S}
_ERRORS = {Cause.LAUNCHER_LOST: "LauncherLost", Cause.HUNG: "Hung", Cause.PEER_LOST: "PeerLost"}


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


class Watchdog:
    """Watches the peers, through ``runtime.store``, and the launcher, which is the parent process of a supervised rank.

    When one of them is gone it requests a stop. If training cannot stop within GRACE_S, it ends the process. It also
    ends the only rank when that takes too long for what ``Runtime.limited`` bounds.
    """

    def __init__(
        self,
        runtime: Runtime,
        stop: Stop,
        *,
        parent: int | None = None,
        on_blocked: Callable[[RankExit, RankExit | None], None] = lambda exit, first: None,
        step: Callable[[], int | None] = lambda: None,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """``parent``: the process that started this one, as seen at its start; it may have died since.
        ``on_blocked(exit, first)`` is called before a blocked rank is ended with the record ``exit``; ``first`` is the
        launch's first failure, if it is known. ``step()`` returns the present step."""
        self._runtime, self._stop = runtime, stop
        self._on_blocked, self._exit_process = on_blocked, exit_process
        # A shell may end before its job does (nohup). Only a launcher's death leaves the rank without supervision.
        self._parent = (parent or os.getppid()) if runtime.launch.supervised else None
        self.doing = ""  # where the main thread was when this rank learned of another's failure
        self.stalls = Stalls(runtime, step)
        self._heartbeat = Heartbeat(runtime)
        self._answered = time.monotonic()  # when the store last answered
        self.first: RankExit | None = None
        """The launch's first failure, or the stop of a rank that waited for data, once this rank has learned of it."""
        self._published: RankExit | None = None  # the first failure, if it is another rank's and this one published it
        self._stop_is_shared = False
        self._alone_in: tuple[str, float] | None = None
        self._alone_s = 0.0  # that the only rank has been in it
        self._finished = threading.Event()
        self._thread = thread(self._run, "harness-watchdog")
        self._clock = thread(self._tick, "harness-clock")

    def __enter__(self) -> Watchdog:
        self._thread.start()
        if self._runtime.world_size > 1:
            self._clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
        with suppress(Exception):
            self._heartbeat.end()

    def report(self, failure: RankExit) -> RankExit | None:
        """Publish ``failure`` and return the launch's first one: this, or an earlier one of a peer. None if the store
        is gone or there is none. Never raises, so that the failure itself gets reported."""
        with suppress(Exception):
            if self._runtime.store is not None and self.first is None:
                first = self._runtime.store.compare_set(_KEY, "", failure.to_json())
                self.first = RankExit.from_dict(json.loads(first))
        self.acknowledge()
        return self.first

    def acknowledge(self) -> None:
        """Publish that this rank has seen the failure."""
        with suppress(Exception):
            if self._runtime.store is not None:
                self._runtime.store.set(f"heard/{self._runtime.rank}", "")

    def linger(self) -> None:
        """Wait until all peers have seen the failure, at most NEWS_S: the store or the launcher may end with this
        rank."""
        self._wait_for([f"heard/{rank}" for rank in range(self._runtime.world_size)], NEWS_S)

    def missing(self, doing: str, timed_out: bool) -> RankExit | None:
        """The rank that a collective of this rank, in ``doing``, waited for, as ``Stalls.missing``, or that this rank
        has found before. None if another rank has published the first failure, or is looking for it."""
        self._peer_failure()
        if self.first:
            return self._published
        found = self.stalls.missing(doing, timed_out)
        if found is None and self._wait_for([_KEY], ANSWER_S + NEWS_S):
            self._peer_failure()
        return found

    def _wait_for(self, keys: Sequence[str], limit_s: float) -> bool:
        """True once the store has all ``keys``; False after ``limit_s``, or if the store does not answer."""
        store, deadline = self._runtime.store, time.monotonic() + limit_s
        with suppress(Exception):
            while store is not None and time.monotonic() < deadline:
                if store.check(keys):
                    return True
                time.sleep(_POLL_S)
        return False

    def _tick(self) -> None:  # apart from the watchdog, which may wait for the store
        while not self._finished.wait(PERIOD_S):
            self.stalls.tick()

    def _run(self) -> None:
        while not self._finished.wait(PERIOD_S):
            if self._parent is not None and os.getppid() != self._parent:
                self._end(Cause.LAUNCHER_LOST, "the launcher is gone")
                return
            if overdue := self._overdue():
                self._end(Cause.HUNG, overdue.message, overdue)
                return
            if message := self._peer_failure() or self._silent_peer() or self._stalled():
                first = self.first
                if first is not None and first.rank == self._runtime.rank and first.cause is Cause.HUNG:
                    self._end(Cause.HUNG, first.message)
                elif first is not None and first.cause is Cause.STOPPED:
                    self._end(Cause.STOPPED, first.message)
                else:
                    self._end(Cause.PEER_LOST, message)
                return
            with suppress(Exception):
                self._share_stop()
                self.stalls.answer()

    def _overdue(self) -> RankExit | None:
        """The failure of the only rank if it takes longer than allowed. Counts periods, in none of which this process
        was suspended."""
        within, before = self._runtime.alone_in, self._alone_in
        self._alone_in, self._alone_s = within, self._alone_s + PERIOD_S if within is before else 0.0
        if within is None or self._alone_s <= within[1]:
            return None
        what, limit_s = within
        at = stack.main_thread_at()
        self.doing = at
        message = f"{what} has not ended within {limit_s:g} s: it was in {at}"
        return RankExit(
            self._runtime.rank, Cause.HUNG, EXIT_FAILURE, self._runtime.host, self.stalls.step(), "Hung", message, at,
            stack.main_thread_lines(), time.time(),
        )  # fmt: skip

    def _share_stop(self) -> None:
        """Announce a signal that this rank has received, or take note of one that another announced. The ranks agree on
        a stop between steps (harness.distributed.stop); this is for one that waits for data."""
        store = self._runtime.store
        if store is None or self._stop_is_shared:
            return
        if self._stop.heard:
            store.set(_STOP, self._stop.heard)
        elif store.check([_STOP]):
            self._stop.hear(store.get(_STOP))
        self._stop_is_shared = bool(self._stop.heard)

    def _peer_failure(self) -> str:
        store = self._runtime.store
        if store is None:
            return ""
        try:
            failed = store.check([_KEY])
            self._answered = time.monotonic()
            if not failed:
                return ""
            self.first = RankExit.from_dict(json.loads(store.get(_KEY)))
        except StoreTimeout:  # harmless by itself; see Stalls.missing
            return ""
        except Exception:
            self.doing = self.doing or stack.main_thread_at()
            return _STORE_LOST
        self.doing = self.doing or stack.main_thread_at()
        self.acknowledge()
        return f"rank {self.first.rank} failed"

    def _silent_peer(self) -> str:
        """Find and publish a rank whose process is gone, stopped or out of reach. The main thread may be waiting for it
        without an end, in a CUDA synchronization."""
        found: RankExit | None = None
        with suppress(Exception):
            if (rank := self._heartbeat.beat()) is not None:
                found = self.stalls.silent(rank)
        return self._publish(found) if found else ""

    def _stalled(self) -> str:
        """Find and publish the rank that is missing, if the main thread waits for it without an end: in a collective of
        nccl. One of gloo raises after the timeout."""
        limit_s = self._runtime.limit_s
        if self._runtime.world_size == 1:  # which starts no collectives
            return ""
        if self.stalls.waited_s() < limit_s + 2 * PERIOD_S:
            return ""
        store_is_lost = time.monotonic() - self._answered >= limit_s
        found = self.stalls.missing(stack.main_thread_at(), timed_out=False)
        if found is not None and (found.cause is Cause.HUNG or store_is_lost):
            return self._publish(found)
        if found is not None:  # it may only be slow to answer; its heartbeat decides
            self.stalls.withdraw()
        return _STORE_LOST if store_is_lost else ""

    def _publish(self, found: RankExit) -> str:
        """Publish the failure of another rank that cannot report it itself; return the message."""
        self.doing = stack.main_thread_at()
        self.first = self.report(found) or found
        self._published = found if self.first == found else None
        return f"rank {self.first.rank} failed: {self.first.message}"

    def _end(self, cause: Cause, message: str, own: RankExit | None = None) -> None:
        """End this rank, which is blocked, unless it ends by itself. ``own``: a failure of this rank that the others
        have to learn of. They hear of it last: they would agree on a stop with a main thread that continues."""
        if own is None:
            self._stop.request(message)
        grace_s = 0.0 if own else min(_GRACES_S.get(cause, GRACE_S), GRACE_S)
        if self._finished.wait(grace_s):
            return
        first = own or self.first
        exit = own or RankExit(
            self._runtime.rank, cause, first.exit_code if first and cause is Cause.STOPPED else EXIT_FAILURE,
            self._runtime.host, self.stalls.step(), _ERRORS.get(cause, ""), message,
            self.doing or stack.main_thread_at(), first.traceback if first and cause is Cause.HUNG else [], time.time(),
        )  # fmt: skip
        if own:
            log.error("error: %s\n%s", message, "".join(own.traceback).rstrip())
        elif cause is Cause.STOPPED:
            log.info(message)
        else:
            log.error("exiting, because this rank is blocked: %s", message)
        self._on_blocked(exit, first)
        if own:
            self.report(own)
        self.stalls.release()
        logging.shutdown()
        time.sleep(0.1)
        self._exit_process(exit.exit_code)
