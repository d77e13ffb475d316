"""A thread that ends this rank when it would otherwise wait for a process that is gone, or alone and without an end.

A rank blocked in a collective cannot see that a peer failed (nccl waits for its whole timeout) or that its launcher was
killed. A failing rank therefore puts its RankExit into the launch's key-value store, where every watchdog looks for it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.distributed import processes, stack
from harness.distributed.launch_env import Launch
from harness.distributed.rank_exit import Cause, RankExit
from harness.distributed.runtime import Runtime, main_groups
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
ANSWER_S = 4.0  # for the watchdogs of the other ranks to answer
_POLL_S = 0.1
_PAUSED_S = 5.0  # a watchdog that did not run for so long was stopped
_BEAT_S = 5.0  # between two heartbeats
_ASKED = "asked"
_STOPPED, _TRACED, _ENDED = "Tt", "t", "X"  # states of a process
_CANNOT_ANSWER = (*_STOPPED, _ENDED)
_IN_ORDER = "ended"  # in place of a count of heartbeats: the rank has ended in order, maybe before others
_STORE_LOST = "rank 0, or the launcher, is gone"
_GRACES_S = {Cause.HUNG: NEWS_S, Cause.STOPPED: STOP_GRACE_S}


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
        """True if the only rank takes longer than allowed: that is then the first failure. Counts periods, in none of
        which this process was suspended."""
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

    def _end(self, exit: RankExit) -> None:
        """End this rank, which is blocked, with the record ``exit``, unless it ends by itself."""
        overdue = exit.cause is Cause.HUNG and self._runtime.world_size == 1
        if not overdue:
            self._stop.request(exit.message)
            if self._finished.wait(min(_GRACES_S.get(exit.cause, GRACE_S), GRACE_S)):
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
        time.sleep(0.1)
        self._exit_process(exit.exit_code)


@dataclass(frozen=True)
class Position:
    """Where a rank is."""

    step: int | None
    started: dict[str, int]
    """Collectives that it has started, by process group."""
    doing: str
    stack: list[str]
    waited_s: float
    """Time since it started the last one."""


class Stalls:
    """Finds the rank that keeps this one waiting, by the number of collectives that each rank has started. ``step``
    returns the current step.

    A rank that has waited too long queries the watchdogs of all ranks, through the store, for the positions of their
    ranks. Until then, nothing is exchanged. A rank that does not respond is stopped, blocked outside Python, or has
    ended.
    """

    def __init__(self, runtime: Runtime, step: Callable[[], int | None]) -> None:
        self._runtime, self.step = runtime, step
        self._started: dict[str, int] = {}
        self._since = self._ticked = time.monotonic()
        self._pause_s, self._paused_at = 0.0, 0.0
        self._waited_in = ""  # the place of the collective that has failed
        self._frozen: processes.Identity | None = None  # the process of the rank that was found HUNG without an answer

    def tick(self) -> None:
        """To be called about once per second."""
        now = time.monotonic()
        if now - self._ticked > _PAUSED_S:
            self._pause_s, self._paused_at = now - self._ticked, now
        self._ticked = now
        if (started := num_started()) != self._started:
            self._started, self._since = started, now

    def pause_s(self) -> float:
        """How long this process did not run within its present wait; 0 if it did all the time."""
        now = time.monotonic()
        if now - self._ticked > _PAUSED_S:
            return now - self._ticked
        return self._pause_s if now - self._paused_at < self._runtime.limit_s else 0.0

    def waited_s(self) -> float:
        """Time since this rank started a collective."""
        return time.monotonic() - self._since

    def answer(self) -> None:
        """Publish where this rank is, if another rank has asked."""
        store = self._runtime.store
        if store is not None and self._runtime.world_size > 1 and store.check([_ASKED]):
            position = self._position(self._waited_in or stack.main_thread_at())
            store.set(f"at/{self._runtime.rank}", json.dumps(asdict(position)))

    def missing(self, doing: str, timed_out: bool) -> RankExit | None:
        """The rank for which this one waited in ``doing``: HUNG, or NODE_LOST if it is gone or out of reach. None if
        that cannot be determined, or if another rank is determining it. Takes little more than ANSWER_S.

        ``timed_out``: a collective of this rank has timed out.
        """
        store, rank = self._runtime.store, self._runtime.rank
        if store is None or not self._runtime.peers:
            return None
        self._waited_in = doing
        try:
            if store.compare_set(_ASKED, "", str(rank)) != str(rank):
                return None
            positions = self._ask({rank: self._position(doing)})
            found = self._silent(positions) or self._behind(positions, timed_out)
            if found is None:
                store.delete(_ASKED)
            return found
        except Exception:  # the store does not respond, or is closed
            # A launcher that is frozen harms no rank; a rank that is frozen does.
            holder_is_rank_0 = not self._runtime.launch.store_is_held and rank != 0
            return self._silent(range(1, self._runtime.world_size)) if holder_is_rank_0 else None

    def withdraw(self) -> None:
        """Let another rank ask, which may see the silent one's process."""
        with suppress(Exception):
            if self._runtime.store is not None:
                self._runtime.store.delete(_ASKED)

    def silent(self, rank: int) -> RankExit | None:
        """``rank``, whose process has not given a sign of life for ``timeout_s``: HUNG, or NODE_LOST if it is gone or
        out of reach."""
        return self._silent([other for other in range(self._runtime.world_size) if other != rank])

    def release(self) -> None:
        """Let the rank that ``missing`` found end if it cannot answer: continue a stopped process, which is then
        notified of the failure, and kill one in which no thread of Python can run. Call it once everything is
        recorded."""
        state = self._frozen.state() if self._frozen else ""
        if self._frozen and state and state not in (_ENDED, _TRACED):
            processes.send(signal.SIGCONT if state in _STOPPED else signal.SIGKILL, [self._frozen.pid])

    def _position(self, doing: str) -> Position:
        return Position(self.step(), num_started(), doing, stack.main_thread_lines(), self.waited_s())

    def _ask(self, positions: dict[int, Position]) -> dict[int, Position]:
        """``positions`` and those of all ranks that answer in time."""
        store, deadline = self._runtime.store, time.monotonic() + ANSWER_S
        assert store is not None
        while time.monotonic() < deadline:
            for rank in (silent := self._others(positions)):
                if store.check([key := f"at/{rank}"]):
                    positions[rank] = Position(**json.loads(store.get(key)))
            if all(self._runtime.peers[rank].state() in _CANNOT_ANSWER for rank in silent if rank not in positions):
                break
            time.sleep(_POLL_S)
        return positions

    def _others(self, ranks: Collection[int]) -> list[int]:
        return [rank for rank in range(self._runtime.world_size) if rank not in ranks]

    def _silent(self, answered: Collection[int]) -> RankExit | None:
        """The first rank that has not ``answered``, and why."""
        for rank in self._others(answered):
            process = self._runtime.peers[rank]
            state, name = process.state(), f"its process {process.pid}"
            if state == _ENDED:
                return self._exit(rank, Cause.NODE_LOST, f"{name} ended without a report")
            if state == "":
                reason = f"{name} does not answer: it is stopped, blocked or gone, or its machine is out of reach"
                return self._exit(rank, Cause.NODE_LOST, reason)
            self._frozen = process
            if state in _STOPPED:
                return self._exit(rank, Cause.HUNG, f"{name} is stopped, by SIGSTOP or a debugger")
            reason = f"{name} does not answer: it is running C code that does not release the GIL"
            return self._exit(rank, Cause.HUNG, reason)
        return None

    def _behind(self, positions: Mapping[int, Position], timed_out: bool) -> RankExit | None:
        """The rank that has started fewer collectives than one that has waited for the whole timeout."""
        groups = sorted({group for position in positions.values() for group in position.started})
        counts = {rank: [at.started.get(group, 0) for group in groups] for rank, at in positions.items()}
        least, most = (list(map(pick, *counts.values())) for pick in (min, max))
        ahead = {
            rank for rank, count in counts.items()
            if any(n == high > low for n, low, high in zip(count, least, most, strict=True))
        }  # fmt: skip
        longest_s = max((positions[rank].waited_s for rank in ahead), default=0.0)
        if not ahead or not (timed_out or longest_s >= self._runtime.limit_s):
            return None
        if behind := positions.keys() - ahead:
            rank = min(behind, key=lambda rank: (sum(counts[rank]), rank))
            waiting = f"rank {min(ahead)} waited for it in {positions[min(ahead)].doing}"
            return self._exit(rank, Cause.HUNG, f"it was in {positions[rank].doing}; {waiting}", positions[rank])
        # Each one is ahead in some group: they wait in different collectives. The odd one out is named.
        common = Counter(map(tuple, counts.values()))
        rank = min(counts, key=lambda rank: (common[tuple(counts[rank])], -rank))
        other = next(other for other in sorted(counts) if counts[other] != counts[rank])
        reason = f"its collective, in {positions[rank].doing}, does not match that of rank {other}"
        return self._exit(rank, Cause.HUNG, f"{reason}, in {positions[other].doing}", positions[rank])

    def _exit(self, rank: int, cause: Cause, message: str, at: Position | None = None) -> RankExit:
        host = self._runtime.peers[rank].host
        if cause is not Cause.HUNG:  # an engine may have seen more
            text = f"{message} (on {host})"
            return RankExit(rank, cause, EXIT_FAILURE, step=self.step(), error="Lost", message=text, time=time.time())
        message = f"it did not join the other ranks within {self._runtime.limit_s:g} s: {message}"
        at = at or Position(self.step(), {}, "", [], 0.0)
        return RankExit(rank, cause, EXIT_FAILURE, host, at.step, "Hung", message, at.doing, at.stack, time.time())


def num_started() -> dict[str, int]:
    """Collectives that the main thread has started, by process group. torch counts them itself."""
    counts: dict[str, int] = {}
    for group in main_groups():
        with suppress(RuntimeError):  # a backend that does not count
            backends: set[Any] = {group._get_backend(device) for device in group._device_types}
            counts[str(group.group_name)] = sum(backend._get_sequence_number_for_group() for backend in backends)
    return counts


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

    def beat(self) -> int | None:
        """Publish that this rank is alive, and look at the watched one, at most once per period. Returns the watched
        rank once its process has been silent for ``timeout_s``. Raises what the store raises."""
        store, now = self._runtime.store, time.monotonic()
        if store is None or self._runtime.world_size == 1 or now - self._at < self._period_s:
            return None
        passed_s, self._at = now - self._at, now
        if passed_s > 2 * self._period_s:  # this process was stopped, or without the store, and maybe the other as well
            passed_s = self._silent_s = 0.0
        self._count += 1
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
        """Publish that this rank ends in order: nobody waits for it. Raises what the store raises."""
        if self._runtime.store is not None and self._runtime.world_size > 1:
            self._runtime.store.set(_beat_of(self._runtime.rank), _IN_ORDER)


def _beat_of(rank: int) -> str:
    return f"beat/{rank}"
