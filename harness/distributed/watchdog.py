"""A thread that ends this rank when it would otherwise wait for a process that is gone, or alone and without an end.

A rank blocked in a collective cannot see that a peer failed (nccl waits for its whole timeout) or that its launcher was
killed. A failing rank therefore puts its RankExit into the launch's key-value store, where every watchdog looks for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from harness.distributed import stack, stalls
from harness.distributed.heartbeat import Heartbeat
from harness.distributed.rank_exit import Cause, RankExit
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.distributed.store import StoreTimeout
from harness.distributed.threads import thread

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
        self.stalls = stalls.Stalls(runtime, step)
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
                self.first = RankExit.from_json(self._runtime.store.compare_set(_KEY, "", failure.to_json()))
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
        """Return the rank that a collective of this rank, in ``doing``, waited for, as ``Stalls.missing``, or that this
        rank has found before. None if another rank has published the first failure, or is looking for it."""
        self._peer_failure()
        if self.first:
            return self._published
        found = self.stalls.missing(doing, timed_out)
        if found is None and self._wait_for([_KEY], stalls.ANSWER_S + NEWS_S):
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
            if exit := self._reason_to_end():
                self._end(exit)
                return
            with suppress(Exception):
                self._share_stop()
                self.stalls.answer()

    def _reason_to_end(self) -> RankExit | None:
        """The record with which this rank ends, if it has to."""
        if self._parent is not None and os.getppid() != self._parent:
            return self._exit(Cause.LAUNCHER_LOST, "LauncherLost", "the launcher is gone")
        if self._overdue():
            return self.first
        if message := self._peer_failure() or self._silent_peer() or self._stalled():
            first = self.first
            if first is not None and first.rank == self._runtime.rank and first.cause is Cause.HUNG:
                return first  # as the other ranks have found
            if first is not None and first.cause is Cause.STOPPED:
                return replace(self._exit(Cause.STOPPED, "", first.message), exit_code=first.exit_code)
            return self._exit(Cause.PEER_LOST, "PeerLost", message)
        return None

    def _exit(self, cause: Cause, error: str, message: str) -> RankExit:
        self.doing = self.doing or stack.main_thread_at()
        step = self.stalls.step()
        return RankExit.now(self._runtime.rank, cause, step=step, error=error, message=message, doing=self.doing)

    def _overdue(self) -> bool:
        """Return True if the only rank takes longer than allowed: that is then the first failure. Counts periods, in
        none of which this process was suspended."""
        within, before = self._runtime.alone_in, self._alone_in
        self._alone_in, self._alone_s = within, self._alone_s + PERIOD_S if within is before else 0.0
        if within is None or self._alone_s <= within[1]:
            return False
        self.doing = stack.main_thread_at()
        message = f"{within[0]} has not ended within {within[1]:g} s: it was in {self.doing}"
        self.first = replace(self._exit(Cause.HUNG, "Hung", message), traceback=stack.main_thread_lines())
        return True

    def _share_stop(self) -> None:
        """Announce a signal that this rank has received, or take note of one that another announced. The ranks agree on
        a stop between steps (harness.distributed.stop); this is for one that waits for data."""
        store = self._runtime.store
        if store is None or self._stop_is_shared:
            return
        if self._stop.signal is not None:
            store.set(_STOP, str(self._stop.signal))
        elif number := store.find(_STOP):
            self._stop.hear(int(number))
        self._stop_is_shared = self._stop.signal is not None

    def _peer_failure(self) -> str:
        store = self._runtime.store
        if store is None:
            return ""
        try:
            record = store.find(_KEY)
        except StoreTimeout:  # harmless by itself; see Stalls.missing
            return ""
        except Exception:
            self.doing = self.doing or stack.main_thread_at()
            return _STORE_LOST
        self._answered = time.monotonic()
        if not record:
            return ""
        self.doing = self.doing or stack.main_thread_at()
        self.acknowledge()
        try:
            self.first = RankExit.from_json(record)
        except ValueError:
            return "another rank failed, and its record cannot be read"
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

    def _end(self, exit: RankExit) -> None:
        """End this rank, which is blocked, with the record ``exit``, unless it ends by itself."""
        overdue = exit.cause is Cause.HUNG and self._runtime.world_size == 1
        if not overdue:
            self._stop.request(exit.message)
            if self._finished.wait(_GRACES_S.get(exit.cause, GRACE_S)):
                return
        if overdue:
            log.error("error: %s\n%s", exit.message, "".join(exit.traceback).rstrip())
        elif exit.cause is Cause.HUNG:  # the others print what they have found
            log.error("the other ranks are no longer waiting for this one: exiting")
        elif exit.cause is Cause.STOPPED:
            log.info(exit.message)
        else:
            log.error("exiting, because this rank is blocked: %s", exit.message)
        self._on_blocked(exit, self.first)
        self.stalls.release()
        logging.shutdown()
        self._exit_process(exit.exit_code)
