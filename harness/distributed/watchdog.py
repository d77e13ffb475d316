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
from harness.distributed.rank_exit import Cause, RankExit
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.distributed.store import LIMIT_S, StoreTimeout
from harness.distributed.threads import thread

log = logging.getLogger("harness")

_KEY = "failed"  # in the store: the RankExit of the first failure
_STOP = "stop"  # in the store: the signal that some rank has received
PERIOD_S = 1.0  # between two looks
GRACE_S = 12.0  # for the main thread to end by itself, with a checkpoint or a traceback
JOIN_S = 1.0  # for the thread to return from a request to the store
STOP_GRACE_S = 5.0  # likewise, once another rank has stopped without a checkpoint
NEWS_S = 3.0  # for all ranks to be notified of a failure before the failing one closes its connections
_POLL_S = 0.1
_STORE_LOST = "rank 0, or the launcher, is gone"
_BEAT_S = 5.0  # between two heartbeats
_BUSY_S = stalls.ANSWER_S + LIMIT_S  # that the watchdog may need between two, to ask where the ranks are
_IN_ORDER = "ended"  # in place of a count of heartbeats: the rank has ended in order, maybe before others
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
        on_blocked: Callable[[RankExit, RankExit | None], None] = lambda record, first: None,
        step: Callable[[], int | None] = lambda: None,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """``parent``: the process that started this one, as seen at its start; it may have died since.
        ``on_blocked(record, first)`` is called before a blocked rank is ended with ``record``; ``first`` is the
        launch's first failure, if it is known. ``step()`` returns the present step."""
        self._runtime, self._stop = runtime, stop
        self._on_blocked, self._exit_process = on_blocked, exit_process
        # A shell may end before its job does (nohup). Only a launcher's death leaves the rank without supervision.
        self._parent = (parent or os.getppid()) if runtime.launch.supervised else None
        self.doing = ""  # where the main thread was when this rank learned of another's failure
        self.stalls = stalls.Stalls(runtime, step)
        self._heartbeat = Heartbeat(runtime)
        self._answered = time.monotonic()  # when the store last answered
        self.first_failure: RankExit | None = None
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

    def publish_failure(self, failure: RankExit) -> RankExit | None:
        """Publish ``failure`` and return the launch's first one: this, or an earlier one of a peer. None if the store
        is gone or there is none. Never raises, so that the failure itself gets reported."""
        with suppress(Exception):
            if self._runtime.store is not None and self.first_failure is None:
                self.first_failure = RankExit.from_json(self._runtime.store.compare_set(_KEY, "", failure.to_json()))
        self.acknowledge()
        return self.first_failure

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
        if self.first_failure:
            return self._published
        found = self.stalls.missing(doing, timed_out)
        if found is None and self._wait_for([_KEY], stalls.ANSWER_S + NEWS_S):
            self._peer_failure()
        return found

    def _wait_for(self, keys: Sequence[str], limit_s: float) -> bool:
        """Return True once the store has all ``keys``; False after ``limit_s``, or if the store does not answer."""
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
            if record := self._reason_to_end():
                self._end(record)
                return
            with suppress(Exception):
                self._share_stop()
                self.stalls.answer()

    def _reason_to_end(self) -> RankExit | None:
        """Return the record with which this rank ends, if it has to: the launcher is gone; the only rank is overdue; a
        peer has failed, is silent, or keeps this rank waiting. The checks of peers set ``first_failure``, and return
        why."""
        if self._parent is not None and os.getppid() != self._parent:
            return self._record(Cause.LAUNCHER_LOST, "LauncherLost", "the launcher is gone")
        if self._overdue():
            return self.first_failure
        if message := self._peer_failure() or self._silent_peer() or self._stalled():
            first = self.first_failure
            if first is not None and first.rank == self._runtime.rank and first.cause is Cause.HUNG:
                return first  # it is this rank that the others found hung
            if first is not None and first.cause is Cause.STOPPED:
                return replace(self._record(Cause.STOPPED, "", first.message), exit_code=first.exit_code)
            return self._record(Cause.PEER_LOST, "PeerLost", message)
        return None

    def _record(self, cause: Cause, error: str, message: str) -> RankExit:
        self.doing = self.doing or stack.main_thread_at()
        step = self.stalls.step()
        return RankExit.now(self._runtime.rank, cause, step=step, error=error, message=message, doing=self.doing)

    def _overdue(self) -> bool:
        """Return True if the only rank takes longer than allowed: that is then the first failure. Counts periods, in
        none of which this process was suspended."""
        within = self._runtime.alone_in
        self._alone_s = self._alone_s + PERIOD_S if within is self._alone_in else 0.0
        self._alone_in = within
        if within is None or self._alone_s <= within[1]:
            return False
        self.doing = stack.main_thread_at()
        message = f"{within[0]} has not ended within {within[1]:g} s: it was in {self.doing}"
        self.first_failure = replace(self._record(Cause.HUNG, "Hung", message), traceback=stack.main_thread_lines())
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
            self.first_failure = RankExit.from_json(record)
        except ValueError:
            return "another rank failed, and its record cannot be read"
        return f"rank {self.first_failure.rank} failed"

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
        if found is not None:  # the rank found may only be slow to answer; its heartbeat decides
            self.stalls.withdraw()
        return _STORE_LOST if store_is_lost else ""

    def _publish(self, found: RankExit) -> str:
        """Publish the failure of another rank that cannot report it itself; return the message."""
        self.doing = stack.main_thread_at()
        self.first_failure = self.publish_failure(found) or found
        self._published = found if self.first_failure == found else None
        return f"rank {self.first_failure.rank} failed: {self.first_failure.message}"

    def _end(self, record: RankExit) -> None:
        """End this rank, which is blocked, with ``record``, unless it ends by itself."""
        overdue = record.cause is Cause.HUNG and self._runtime.world_size == 1
        if not overdue:
            self._stop.request(record.message)
            if self._finished.wait(_GRACES_S.get(record.cause, GRACE_S)):
                return
        if overdue:
            log.error("error: %s\n%s", record.message, "".join(record.traceback).rstrip())
        elif record.cause is Cause.HUNG:  # the others print what they have found
            log.error("the other ranks are no longer waiting for this one: exiting")
        elif record.cause is Cause.STOPPED:
            log.info(record.message)
        else:
            log.error("exiting, because this rank is blocked: %s", record.message)
        self._on_blocked(record, self.first_failure)
        self.stalls.release()
        logging.shutdown()
        self._exit_process(record.exit_code)


class Heartbeat:
    """The heartbeats of this rank, through the store, and those of the rank that it watches: they tell a rank that is
    gone from one that is slow.

    The watchdog thread publishes them, so they continue while the main thread computes, waits or is blocked in C code
    that releases the GIL. They stop if the process ends, is stopped, or its machine is out of reach. Each rank watches
    the next one, so that the store answers two requests per rank and period, however many ranks there are.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._period_s = min(_BEAT_S, runtime.timeout_s / 4)
        self._count, self._at = 0, -self._period_s
        self._watched = (runtime.rank + 1) % runtime.world_size
        self._heard, self._silent_s = "", 0.0
        self._ended, self._publishing = False, threading.Lock()

    def beat(self) -> int | None:
        """Publish that this rank is alive, and look at the watched one, at most once per period. Returns the watched
        rank once its process has been silent for ``timeout_s``. Raises what the store raises."""
        store, now = self._runtime.store, time.monotonic()
        if store is None or self._runtime.world_size == 1 or now - self._at < self._period_s:
            return None
        passed_s, self._at = now - self._at, now
        if passed_s > 2 * self._period_s + _BUSY_S:  # this process was stopped, and maybe the other as well
            passed_s = self._silent_s = 0.0
        passed_s = min(passed_s, 2 * self._period_s)
        self._count += 1
        with self._publishing:
            if self._ended:  # while this thread waited for the store
                return None
            store.set(_beat_of(self._runtime.rank), str(self._count))
        if self._watched == self._runtime.rank:  # all others have ended
            return None
        heard = store.compare_set(_beat_of(self._watched), "", "0")  # this creates the key if it does not exist
        if heard == _IN_ORDER:
            self._watched = (self._watched + 1) % self._runtime.world_size
            self._heard, self._silent_s = "", 0.0
        elif heard != self._heard:
            self._heard, self._silent_s = heard, 0.0
        else:
            self._silent_s += passed_s
        return self._watched if self._silent_s >= self._runtime.timeout_s else None

    def end(self) -> None:
        """Publish that this rank ends in order: nobody waits for it. ``beat`` publishes nothing more. Raises what the
        store raises."""
        if self._runtime.store is not None and self._runtime.world_size > 1:
            with self._publishing:
                self._ended = True
                self._runtime.store.set(_beat_of(self._runtime.rank), _IN_ORDER)


def _beat_of(rank: int) -> str:
    return f"beat/{rank}"
