"""Finds the rank for which the others wait in a collective, with the help of all watchdogs."""

from __future__ import annotations

import json
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from harness.distributed import processes, stack
from harness.distributed.rank_exit import Cause, RankExit
from harness.distributed.runtime import Runtime, main_groups
from harness.distributed.store import StoreTimeout
from harness.errors import EXIT_FAILURE

ANSWER_S = 4.0  # for the watchdogs of the other ranks to answer
_POLL_S = 0.1
_PAUSED_S = 5.0  # a watchdog that did not run for so long was stopped
_ASKED = "asked"  # holds "RANK:TOKEN" of the question that is open; the answers are at "at/TOKEN/RANK"
_STOPPED, _TRACED, _ENDED = "Tt", "t", "X"  # states of a process
_CANNOT_ANSWER = (*_STOPPED, _ENDED)


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
        self._looking = threading.Lock()
        self._asking = threading.Lock()  # the main thread and the watchdog ask one after the other
        self._answered = ""  # the last question that this rank has answered

    def tick(self) -> None:
        """To be called about once per second."""
        now = time.monotonic()
        if now - self._ticked > _PAUSED_S:
            self._pause_s, self._paused_at = now - self._ticked, now
        self._ticked = now
        self._look()

    def pause_s(self) -> float:
        """Return how long this process did not run within its present wait; 0 if it did all the time."""
        now = time.monotonic()
        if now - self._ticked > _PAUSED_S:
            return now - self._ticked
        return self._pause_s if now - self._paused_at < self._runtime.limit_s else 0.0

    def waited_s(self) -> float:
        """Return the time since this rank started its last collective, or since the first look at it."""
        return self._look()[1]

    def _look(self) -> tuple[dict[str, int], float]:
        """Return the collectives that this rank has started, with the time since the last one. Both are of now: a rank
        that has computed for long and then starts a collective has not waited long for it."""
        with self._looking:  # the clock and the watchdog
            now, started = time.monotonic(), num_started()
            if started != self._started:
                self._started, self._since = started, now
            return started, now - self._since

    def answer(self) -> None:
        """Publish where this rank is, if another rank has asked."""
        store = self._runtime.store
        if store is None or self._runtime.world_size == 1 or (asked := store.find(_ASKED)) in ("", self._answered):
            return
        position = self._position(self._waited_in or stack.main_thread_at())
        store.set(_answer_of(self._runtime.rank, asked), json.dumps(asdict(position)))
        self._answered = asked

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
                asked = store.compare_set(_ASKED, "", question)
                if asked.partition(":")[0] == str(rank) and asked != question:  # an earlier one of this rank
                    asked = store.compare_set(_ASKED, asked, question)
                if asked != question:
                    return None
                positions = self._ask(question, {rank: self._position(doing)})
                found = self._silent(positions) or self._behind(positions, timed_out)
                if found is None:
                    store.delete(_ASKED)
                return found
            except (StoreTimeout, RuntimeError):  # the store does not respond, or is closed
                # A launcher that is frozen harms no rank; a rank that is frozen does. The store runs in a thread of its
                # own, which also a busy rank 0 does not hold up, so that its silence alone is no reason to accuse it.
                holder_is_rank_0 = not self._runtime.launch.store_is_held and rank != 0
                if holder_is_rank_0 and self._runtime.peers[0].state() in ("", *_CANNOT_ANSWER):
                    return self._silent(range(1, self._runtime.world_size))
                return None

    def withdraw(self) -> None:
        """Let another rank ask, which may see the silent one's process."""
        with suppress(Exception):
            if self._runtime.store is not None:
                self._runtime.store.delete(_ASKED)

    def silent(self, rank: int) -> RankExit | None:
        """Return ``rank``, whose process has not given a sign of life for ``timeout_s``: HUNG, or NODE_LOST if it is
        gone or out of reach."""
        return self._silent([other for other in range(self._runtime.world_size) if other != rank])

    def release(self) -> None:
        """Let the rank that ``missing`` found end if it cannot answer: continue a stopped process, which is then
        notified of the failure, and kill one in which no thread of Python can run. Call it once everything is
        recorded."""
        state = self._frozen.state() if self._frozen else ""
        if self._frozen and state and state not in (_ENDED, _TRACED):
            processes.send(signal.SIGCONT if state in _STOPPED else signal.SIGKILL, [self._frozen.pid])

    def _position(self, doing: str) -> Position:
        started, waited_s = self._look()
        return Position(self.step(), started, doing, stack.main_thread_lines(), waited_s)

    def _ask(self, question: str, positions: dict[int, Position]) -> dict[int, Position]:
        """Return ``positions`` and those of all ranks that answer ``question`` in time."""
        store, deadline = self._runtime.store, time.monotonic() + ANSWER_S
        assert store is not None
        while time.monotonic() < deadline:
            for rank in (silent := self._others(positions)):
                if answer := store.find(_answer_of(rank, question)):
                    positions[rank] = Position(**json.loads(answer))
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
            return self._record(rank, Cause.HUNG, f"it was in {positions[rank].doing}; {waiting}", positions[rank])
        # Each one is ahead in some group: they wait in different collectives. The odd one out is named.
        common = Counter(map(tuple, counts.values()))
        rank = min(counts, key=lambda rank: (common[tuple(counts[rank])], -rank))
        other = next(other for other in sorted(counts) if counts[other] != counts[rank])
        reason = f"its collective, in {positions[rank].doing}, does not match that of rank {other}"
        return self._record(rank, Cause.HUNG, f"{reason}, in {positions[other].doing}", positions[rank])

    def _record(self, rank: int, cause: Cause, message: str, at: Position | None = None) -> RankExit:
        host = self._runtime.peers[rank].host
        if cause is not Cause.HUNG:  # an engine may have seen more
            text = f"{message} (on {host})"
            return RankExit(rank, cause, EXIT_FAILURE, step=self.step(), error="Lost", message=text, time=time.time())
        message = f"it did not join the other ranks within {self._runtime.limit_s:g} s: {message}"
        at = at or Position(self.step(), {}, "", [], 0.0)
        return RankExit(rank, cause, EXIT_FAILURE, host, at.step, "Hung", message, at.doing, at.stack, time.time())


def _answer_of(rank: int, question: str) -> str:
    return f"at/{question.partition(':')[2]}/{rank}"


def num_started() -> dict[str, int]:
    """Collectives that the main thread has started, by process group. torch counts them itself."""
    counts: dict[str, int] = {}
    for group in main_groups():
        with suppress(RuntimeError):  # a backend that does not count
            backends: set[Any] = {group._get_backend(device) for device in group._device_types}
            counts[str(group.group_name)] = sum(backend._get_sequence_number_for_group() for backend in backends)
    return counts
