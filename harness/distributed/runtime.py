"""What all ranks do in step: who waits for whom, how long, and who raises an error of one of them. The stages:

stage       may be longer than timeout_s  may hold collectives  an error is raised on  limits a single rank, too
together    no                            no                    all ranks              no
patiently   yes, up to work_timeout_s     no                    all ranks              yes
announced   yes, up to work_timeout_s     yes                   this rank              yes
limited     alone, up to its limit_s      yes                   this rank              yes, by killing it
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from harness.distributed import stack
from harness.distributed.collectives import Collectives, main_groups, new_group, set_timeout
from harness.distributed.store import LimitedStore
from harness.distributed.threads import Background
from harness.errors import HarnessError, OwnCodeError, TrainingError, is_of_machine, portable, readable, users_line

Value = TypeVar("Value")

# So long after timeout_s, torch's own watchdog dumps what NCCL was doing and aborts the process. Before, that of the
# harness finds the missing rank, gives the main thread its grace, and writes the record, which takes up to 30 s.
NCCL_S = 45.0
_HEARTBEAT_S = 5.0  # at most, between two heartbeats in patiently(), and a quarter of timeout_s
_ROUNDS = 6  # of heartbeats in patiently() from the first failure on, in about 1.5 s: other ranks may fail alike


@dataclass
class Runtime(Collectives):
    """One rank: its launch environment, its device, its collectives, and the stages."""

    store: LimitedStore | None = None
    """Torch's key-value store, where there is a process group."""
    timeout_s: float = math.inf
    """How long a rank may be silent."""
    work_timeout_s: float = math.inf
    """How long announced work may take."""
    failed: bool = False
    """Set when this rank reports a failure, its own or a consequence of another's."""
    alone_in: tuple[str, float] | None = None
    """With one rank, what it does, and the seconds that it may take: ``limited`` sets it, the watchdog enforces it."""
    peer_limit_s: float = field(init=False)
    """How long this rank waits for a peer at present: ``timeout_s``, in ``announced`` ``work_timeout_s``."""

    def __post_init__(self) -> None:
        self.peer_limit_s = self.timeout_s

    def new_group(self) -> dist.ProcessGroup | None:
        """Return a gloo group of all ranks for the collectives of another thread, which does announced work.
        Collective."""
        return new_group(self.work_timeout_s) if self.world_size > 1 else None

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Enter a stage together: if any rank raises in it, all raise, so that none waits for another. Collective.

        The body must not contain a collective. The lowest failing rank raises its own error. The others raise a copy,
        with that rank in ``origin_rank``, and what they were ``doing`` if it is no HarnessError.

        ``sys.exit`` in the user's code is such an error. KeyboardInterrupt is not: this process is to end at once, and
        must not wait for the others, which lose its connection. Nor is anything that ends a forked process, whose
        collectives are those of its parent.
        """
        mine: Exception | SystemExit | None = None
        process = os.getpid()
        try:
            yield
        except (Exception, SystemExit) as error:
            if os.getpid() != process:
                raise
            mine = error
        if self.world_size > 1:
            # An error that an inner stage has raised on several ranks keeps the rank that it comes from, which raises
            # ``mine``, with the traceback: rank 1 raises its original, though rank 0 comes first with a copy of it.
            origin = getattr(mine, "origin_rank", None)
            own = None if mine is None else (_portable(mine, doing), self.rank if origin is None else origin)
            theirs = next((error for error in self.gather(own) if error is not None), None)
            if theirs is not None and (mine is None or theirs[1] != self.rank):
                theirs[0].origin_rank = theirs[1]
                raise theirs[0]
        if mine is not None:
            raise mine

    def patiently(self, doing: str, work: Callable[[], Value], limit_s: float | None = None) -> Value:
        """Return ``work()``, which a thread does while the ranks exchange heartbeats: it may take long, but must not
        contain a collective. If any rank raises, all ranks raise; work that is not done then goes on in its thread, and
        nobody waits for it. Collective.

        Raises TrainingError if a rank works longer than ``limit_s``, by default ``work_timeout_s``. Give infinity for
        work that has a limit of its own.
        """
        if self.world_size == 1:
            with self.limited(doing, self.work_timeout_s if limit_s is None else limit_s):
                return work()
        return self.await_work(doing, Background(work, "harness-work"), limit_s)

    def await_work(self, doing: str, work: Background[Value], limit_s: float | None = None) -> Value:
        """Return ``patiently`` for work that every rank has already started. Collective.

        At growing intervals, the ranks tell each other whether they are done, have failed or are late, and so leave in
        the same round: all are done, one is late, or one has failed some rounds ago.
        """
        limit_s = self.work_timeout_s if limit_s is None else limit_s
        if self.world_size == 1:
            with self.limited(doing, limit_s):
                return work.result()
        until, longest_s = time.monotonic() + limit_s, min(_HEARTBEAT_S, self.timeout_s / 4)
        pause_s, since_failure = 0.05, 0
        while since_failure < _ROUNDS:
            done = not wait([work], pause_s).not_done
            failed = done and work.exception() is not None
            late = "" if done or time.monotonic() < until else stack.thread_at(work.thread) or "a thread that has ended"
            ranks = self.gather((done, failed, late))
            if all(done for done, _, _ in ranks):
                break
            if since_failure or any(failed for _, failed, _ in ranks):
                since_failure, pause_s = since_failure + 1, 0.05 * 2**since_failure
            elif overdue := next(((rank, late) for rank, (_, _, late) in enumerate(ranks) if late), None):
                raise _overdue(*overdue, doing, limit_s)
            else:
                pause_s = min(2 * pause_s, longest_s)
        with self.together(doing):
            if done:
                return work.result()
        raise AssertionError("unreachable: a rank failed, so all ranks have raised")

    @contextmanager
    def announced(self, doing: str) -> Iterator[None]:
        """Enter a stage with collectives, in which the ranks wait ``work_timeout_s`` for each other, such as the first
        step of a compiled model. A rank that stops in it is found that late. Collective.

        An error of one rank is not shared: it ends the run as anywhere else.
        """
        if self.world_size == 1:
            with self.limited(doing, self.work_timeout_s):
                yield
            return
        before = self.peer_limit_s
        self._set_peer_limit(self.work_timeout_s)
        try:
            yield
            self.barrier()  # a rank must not wait for timeout_s only, while another still does the work
        finally:
            self._set_peer_limit(before)

    @contextmanager
    def limited(self, doing: str, limit_s: float | None = None) -> Iterator[None]:
        """Enter a stage that the watchdog ends, with the process, if it takes the only rank longer than ``limit_s``, by
        default ``timeout_s``. Of several ranks, the others notice."""
        before = self.alone_in
        self.alone_in = (doing, self.timeout_s if limit_s is None else limit_s) if self.world_size == 1 else None
        try:
            yield
        finally:
            self.alone_in = before

    def _set_peer_limit(self, limit_s: float) -> None:
        """Bound the collectives that start from now on, in all groups but those of other threads."""
        self.peer_limit_s = limit_s
        for group in main_groups() if self.group is not None else ():
            with_nccl = "nccl" in str(dist.get_backend_config(group))
            set_timeout(limit_s + NCCL_S * with_nccl, group)


def _overdue(rank: int, where: str, doing: str, limit_s: float) -> TrainingError:
    """Return the error of all ranks because ``rank`` still works, in ``where``."""
    error = TrainingError(
        f"rank {rank} has not finished after {limit_s:g} s: {doing}, in {where}",
        hint="if this work is merely slow, raise runtime.work_timeout_s; otherwise look at the disk or the server that "
        "it uses",
    )
    error.origin_rank = rank
    return error


def _portable(error: BaseException, doing: str) -> HarnessError:
    """Return ``error`` as a HarnessError that can be pickled."""
    known = portable(error) if isinstance(error, HarnessError) else None
    if isinstance(known, HarnessError):
        return known
    text, where = f"{doing}: {type(error).__name__}: {readable(error)}", users_line(error)
    return OwnCodeError(text, where=where) if where and not is_of_machine(error) else HarnessError(text)
