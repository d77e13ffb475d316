"""A thread that ends this rank when it would otherwise wait for a process that is gone, or alone and without an end.

A rank blocked in a collective cannot see that a peer failed (nccl waits for its whole timeout) or that its launcher was
killed. A failing rank therefore puts its RankExit into the launch's key-value store, where every watchdog looks for it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.distributed import processes, stack
from harness.distributed.collectives import main_groups
from harness.distributed.rank_exit import Cause, RankExit
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.distributed.store import LIMIT_S, LimitedStore, StoreTimeout
from harness.distributed.threads import thread
from harness.errors import EXIT_FAILURE

log = logging.getLogger("harness")

_KEY = "failed"  # in the store: the RankExit of the first failure
_ASKED = "asked"  # in the store: "RANK:TOKEN" of the question that is open; the answers are at "at/TOKEN/RANK"
PERIOD_S = 1.0  # between two looks
GRACE_S = 12.0  # for the main thread to end by itself, with a checkpoint or a traceback
JOIN_S = 1.0  # for the thread to return from a request to the store
NEWS_S = 3.0  # for all ranks to be notified of a failure before the failing one closes its connections
ANSWER_S = 10.0  # for the watchdogs of the other ranks to say where their ranks are
_POLL_S = 0.1
_STORE_LOST = "rank 0, or the launcher, is gone"
_STOPPED, _TRACED, _ENDED = "Tt", "t", "X"  # states of a process
_CANNOT_ANSWER = (*_STOPPED, _ENDED)


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
        on_blocked: Callable[[RankExit, RankExit | None], None] = lambda record, first: None,
        step: Callable[[], int | None] = lambda: None,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """Let ``on_blocked(record, first)`` be called before a blocked rank is ended with ``record``; ``first`` is the
        launch's first failure, if it is known. ``step()`` returns the present step."""
        self._runtime, self._stop = runtime, stop
        self._on_blocked, self._exit_process = on_blocked, exit_process
        self.stalls = Stalls(runtime, step)
        self._answered = time.monotonic()  # when the store last answered
        self.first_failure: RankExit | None = None
        """The launch's first failure, once this rank has learned of it."""
        self._published: RankExit | None = None  # the first failure, if it is another rank's and this one published it
        self._alone_in: tuple[str, float] | None = None
        self._alone_s = 0.0  # that the only rank has been in it
        self._finished = threading.Event()
        self._thread = thread(self._run, "harness-watchdog")

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
        self.acknowledge()

    def publish_failure(self, failure: RankExit) -> RankExit | None:
        """Publish ``failure`` and return the launch's first one: this, or an earlier one of a peer. None if the store
        is gone or there is none. Never raises, so that the failure itself gets reported."""
        with suppress(Exception):
            if self._runtime.store is not None and self.first_failure is None:
                self.first_failure = RankExit.from_json(self._runtime.store.compare_set(_KEY, "", failure.to_json()))
        self.acknowledge()
        return self.first_failure

    def acknowledge(self) -> None:
        """Publish that nobody waits for this rank any more: it has seen the failure, or ends in order."""
        with suppress(Exception):
            if self._runtime.store is not None:
                self._runtime.store.set(_leaves(self._runtime.rank), "yes")

    def linger(self) -> None:
        """Wait until all peers have seen the failure, at most NEWS_S: the store or the launcher may end with this
        rank."""
        self._wait_for([*map(_leaves, range(self._runtime.world_size))], NEWS_S)

    def missing(self, doing: str, timed_out: bool) -> RankExit | None:
        """Return the rank that a collective of this rank, in ``doing``, waited for, as ``Stalls.missing``, or that this
        rank has found before. None if another rank has published the first failure, or is looking for it."""
        self._learn_of_failure()
        if self.first_failure:
            return self._published
        culprit = self.stalls.missing(doing, timed_out)
        if culprit is None and self._wait_for([_KEY], ANSWER_S + NEWS_S):
            self._learn_of_failure()
        return culprit

    def _wait_for(self, keys: Sequence[str], limit_s: float) -> bool:
        """Return True once the store has all ``keys``; False after ``limit_s``, or if the store does not answer."""
        store, deadline = self._runtime.store, time.monotonic() + limit_s
        with suppress(Exception):
            while store is not None and time.monotonic() < deadline:
                if store.check(keys):
                    return True
                time.sleep(_POLL_S)
        return False

    def _run(self) -> None:
        while not self._finished.wait(PERIOD_S):
            if record := self._look():
                self._end(record)
                return
            with suppress(Exception):
                self.stalls.answer()

    def _look(self) -> RankExit | None:
        """Look at the launcher and the peers, and publish what is found. Return the record with which this rank ends,
        if it has to: the launcher is gone; the only rank is overdue; a peer has failed, or keeps this rank waiting."""
        if self._runtime.launch.orphaned:
            return self._record(Cause.LAUNCHER_LOST, "LauncherLost", "the launcher is gone")
        if overdue := self._count_alone():
            self.first_failure = overdue
            return overdue
        if message := self._learn_of_failure() or self._publish_missing():
            first = self.first_failure
            if first is not None and first.rank == self._runtime.rank and first.cause is Cause.HUNG:
                return first  # it is this rank that the others found hung
            return self._record(Cause.PEER_LOST, "PeerLost", message)
        return None

    def _record(self, cause: Cause, error: str, message: str) -> RankExit:
        doing, step = stack.main_thread_at(), self.stalls.step()
        return RankExit.now(self._runtime.rank, cause, step=step, error=error, message=message, doing=doing)

    def _count_alone(self) -> RankExit | None:
        """Count a period, in which this process was not suspended, of what the only rank is in. Return the record of
        its failure if it takes longer than allowed."""
        within = self._runtime.alone_in
        self._alone_s = self._alone_s + PERIOD_S if within is self._alone_in else 0.0
        self._alone_in = within
        if within is None:
            return None
        doing, limit_s = within
        if self._alone_s <= limit_s:
            return None
        message = f"{doing} has not ended within {limit_s:g} s: it was in {stack.main_thread_at()}"
        return replace(self._record(Cause.HUNG, "Hung", message), traceback=stack.main_thread_lines())

    def _learn_of_failure(self) -> str:
        """Look for the launch's first failure in the store, keep it, and acknowledge it. Return a message if there is
        one, or if the store is gone."""
        store = self._runtime.store
        if store is None:
            return ""
        try:
            record = store.find(_KEY)
        except StoreTimeout:  # harmless by itself; see Stalls.missing
            return ""
        except Exception:
            return _STORE_LOST
        self._answered = time.monotonic()
        if not record:
            return ""
        self.acknowledge()
        try:
            self.first_failure = RankExit.from_json(record)
        except ValueError:
            return "another rank failed, and its record cannot be read"
        return f"rank {self.first_failure.rank} failed"

    def _publish_missing(self) -> str:
        """Find and publish the rank that is missing, if the main thread waits for it without an end: in a collective of
        nccl, or in a CUDA synchronization. A collective of gloo raises after the timeout. Return the message."""
        limit_s, silent_s = self._runtime.peer_limit_s, time.monotonic() - self._answered
        if self._runtime.world_size == 1 or self.stalls.waited_s() < limit_s + 2 * PERIOD_S:  # one rank starts none
            return ""
        if LIMIT_S <= silent_s < limit_s:  # the store may be late, or its holder frozen
            return ""
        culprit = self.stalls.missing(stack.main_thread_at(), timed_out=False)
        if culprit is None:
            return _STORE_LOST if silent_s >= limit_s else ""
        self.first_failure = self.publish_failure(culprit) or culprit
        self._published = culprit if self.first_failure == culprit else None
        return f"rank {self.first_failure.rank} failed: {self.first_failure.message}"

    def _end(self, record: RankExit) -> None:
        """End this rank, which is blocked, with ``record``, unless it ends by itself."""
        overdue = record.cause is Cause.HUNG and self._runtime.world_size == 1
        if not overdue:
            self._stop.request(record.message)
            if self._finished.wait(NEWS_S if record.cause is Cause.HUNG else GRACE_S):
                return
        if overdue:
            log.error("error: %s\n%s", record.message, "".join(record.traceback).rstrip())
        elif record.cause is Cause.HUNG:  # the others print what they have found
            log.error("the other ranks are no longer waiting for this one: exiting")
        else:
            log.error("exiting, because this rank is blocked: %s", record.message)
        self._on_blocked(record, self.first_failure)
        self.stalls.release()
        logging.shutdown()
        self._exit_process(record.exit_code)


@dataclass(frozen=True)
class Position:
    """Where a rank is."""

    step: int | None
    started: dict[str, int]
    """The collectives that it has started, by process group."""
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
        self._since = time.monotonic()
        self._waited_in = ""  # the place of the collective that has failed
        self._frozen: processes.Identity | None = None  # the process of the rank that was found HUNG without an answer
        self._looking = threading.Lock()
        self._asking = threading.Lock()  # the main thread and the watchdog ask one after the other
        self._answered = ""  # the last question that this rank has answered
        self._open = "", 0.0  # the question of another rank, and when this one first found it open

    def waited_s(self) -> float:
        """Return the time since this rank started its last collective, or since the first look at it. To be called
        about once per second."""
        return self._look()[1]

    def _look(self) -> tuple[dict[str, int], float]:
        """Return the collectives that this rank has started, with the time since the last one. Both are of now: a rank
        that has computed for long and then starts a collective has not waited long for it."""
        with self._looking:  # the main thread and the watchdog
            now, started = time.monotonic(), num_started()
            if started != self._started:
                self._started, self._since = started, now
            return started, now - self._since

    def answer(self) -> None:
        """Publish where this rank is, if another rank has asked."""
        store = self._runtime.store
        if store is None or self._runtime.world_size == 1 or (question := store.find(_ASKED)) in ("", self._answered):
            return
        position = self._position(self._waited_in or stack.main_thread_at())
        store.set(_answer_of(self._runtime.rank, question), json.dumps(asdict(position)))
        self._answered = question

    def missing(self, doing: str, timed_out: bool) -> RankExit | None:
        """Return the rank for which this one waited in ``doing``: HUNG, or NODE_LOST if it is gone or out of reach.
        None if that cannot be determined, or if another rank is determining it. Takes little more than ANSWER_S.

        ``timed_out``: a collective of this rank has timed out.
        """
        store, rank = self._runtime.store, self._runtime.rank
        if store is None or not self._runtime.peers:
            return None
        self._waited_in = doing
        # A new one each time: the answers to an earlier question say where the ranks were then.
        question = f"{rank}:{secrets.token_hex(4)}"
        with self._asking:
            try:
                current = store.compare_set(_ASKED, "", question)
                if current != question and (current.partition(":")[0] == str(rank) or self._is_old(current)):
                    current = store.compare_set(_ASKED, current, question)
                if current != question:
                    return None
                positions = self._ask(store, question, {rank: self._position(doing)})
                leaving = [rank for rank in self._others(positions) if store.find(_leaves(rank))]
                culprit = self._silent([*positions, *leaving]) or self._behind(positions, timed_out)
                if culprit is None:
                    store.set(_ASKED, "")
                return culprit
            except (StoreTimeout, RuntimeError):  # the store does not respond, or is closed
                # A launcher that is frozen harms no rank; a rank that is frozen does. The store runs in a thread of its
                # own, which also a busy rank 0 does not hold up, so that its silence alone is no reason to accuse it.
                holder_is_rank_0 = not self._runtime.launch.store_is_held and rank != 0
                if holder_is_rank_0 and self._runtime.peers[0].state() in ("", *_CANNOT_ANSWER):
                    return self._silent(range(1, self._runtime.world_size))
                return None

    def _is_old(self, question: str) -> bool:
        """Return True if ``question`` has been open for so long that the rank that asked it must be gone."""
        if question != self._open[0]:
            self._open = question, time.monotonic()
        return time.monotonic() - self._open[1] > 2 * ANSWER_S

    def release(self) -> None:
        """Free the rank that ``missing`` found if it cannot answer: continue a stopped process, which is then
        notified of the failure, and kill one in which no thread of Python can run. Call it once everything is
        recorded."""
        state = self._frozen.state() if self._frozen else ""
        if self._frozen and state and state not in (_ENDED, _TRACED):
            processes.send(signal.SIGCONT if state in _STOPPED else signal.SIGKILL, [self._frozen.pid])

    def _position(self, doing: str) -> Position:
        started, waited_s = self._look()
        return Position(self.step(), started, doing, stack.main_thread_lines(), waited_s)

    def _ask(self, store: LimitedStore, question: str, positions: dict[int, Position]) -> dict[int, Position]:
        """Return ``positions`` and those of all ranks that answer ``question`` in time."""
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            for rank in (silent := self._others(positions)):
                if text := store.find(_answer_of(rank, question)):
                    positions[rank] = Position(**json.loads(text))
            if all(self._runtime.peers[rank].state() in _CANNOT_ANSWER for rank in silent if rank not in positions):
                break
            time.sleep(_POLL_S)
        return positions

    def _others(self, ranks: Collection[int]) -> list[int]:
        return [rank for rank in range(self._runtime.world_size) if rank not in ranks]

    def _silent(self, answered: Collection[int]) -> RankExit | None:
        """Return the first rank that has not ``answered``, and why."""
        for rank in self._others(answered):
            process = self._runtime.peers[rank]
            state, name = process.state(), f"its process {process.pid}"
            if state == _ENDED:
                return self._record(rank, Cause.NODE_LOST, f"{name} ended without a report")
            if state == "":
                reason = f"{name} does not answer: it is stopped, blocked or gone, or its machine is out of reach"
                return self._record(rank, Cause.NODE_LOST, reason)
            self._frozen = process
            if state in _STOPPED:
                return self._record(rank, Cause.HUNG, f"{name} is stopped, by SIGSTOP or a debugger")
            reason = f"{name} does not answer: it is running C code that does not release the GIL"
            return self._record(rank, Cause.HUNG, reason)
        return None

    def _behind(self, positions: Mapping[int, Position], timed_out: bool) -> RankExit | None:
        """Return the rank that has started fewer collectives than one that has waited for the whole timeout."""
        groups = sorted({group for position in positions.values() for group in position.started})
        counts = {rank: [position.started.get(group, 0) for group in groups] for rank, position in positions.items()}
        least, most = (list(map(pick, *counts.values())) for pick in (min, max))
        ahead = {
            rank for rank, count in counts.items()
            if any(n == high > low for n, low, high in zip(count, least, most, strict=True))
        }  # fmt: skip
        longest_s = max((positions[rank].waited_s for rank in ahead), default=0.0)
        if not ahead or not (timed_out or longest_s >= self._runtime.peer_limit_s):
            return None
        if behind := positions.keys() - ahead:
            rank = min(behind, key=lambda rank: (sum(counts[rank]), rank))
            waiting = f"rank {min(ahead)} waited for it in {positions[min(ahead)].doing}"
            return self._record(rank, Cause.HUNG, f"it was in {positions[rank].doing}; {waiting}", positions[rank])
        # Each one is ahead in some group: they wait in different collectives. The odd one out is named.
        common = Counter(map(tuple, counts.values()))
        rank = min(counts, key=lambda rank: (common[tuple(counts[rank])], -rank))
        mismatched = next(mismatched for mismatched in sorted(counts) if counts[mismatched] != counts[rank])
        reason = f"its collective, in {positions[rank].doing}, does not match that of rank {mismatched}"
        return self._record(rank, Cause.HUNG, f"{reason}, in {positions[mismatched].doing}", positions[rank])

    def _record(self, rank: int, cause: Cause, message: str, position: Position | None = None) -> RankExit:
        host = self._runtime.peers[rank].host
        if cause is not Cause.HUNG:  # an engine may have seen more
            text = f"{message} (on {host})"
            return RankExit(rank, cause, EXIT_FAILURE, step=self.step(), error="Lost", message=text, time=time.time())
        message = f"it did not join the other ranks within {self._runtime.peer_limit_s:g} s: {message}"
        position = position or Position(self.step(), {}, "", [], 0.0)
        return RankExit(
            rank,
            cause,
            EXIT_FAILURE,
            host,
            position.step,
            error="Hung",
            message=message,
            doing=position.doing,
            traceback=position.stack,
            time=time.time(),
        )


def _answer_of(rank: int, question: str) -> str:
    return f"at/{question.partition(':')[2]}/{rank}"


def _leaves(rank: int) -> str:
    return f"leaves/{rank}"


def num_started() -> dict[str, int]:
    """Return the collectives that the main thread has started, by process group. torch counts them itself."""
    counts: dict[str, int] = {}
    for group in main_groups():
        with suppress(RuntimeError):  # a backend that does not count
            backends: set[Any] = {group._get_backend(device) for device in group._device_types}
            counts[str(group.group_name)] = sum(backend._get_sequence_number_for_group() for backend in backends)
    return counts
