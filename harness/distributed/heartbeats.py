"""Ranks that tell each other how far their threads are, so that none waits in a collective for work that takes long."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from harness.distributed import stack
from harness.distributed.threads import Background
from harness.errors import TrainingError

_LONGEST_S = 5.0  # between two heartbeats, at most
_ROUNDS = 6  # from the first failure on, in about 1.5 s: other ranks may fail alike


def await_all(
    doing: str, work: Background[Any], limit_s: float, timeout_s: float, gather: Callable[[Any], list[Any]]
) -> None:
    """Return once ``work`` is done on all ranks, or has failed on one some rounds ago: on all ranks in the same round.
    ``gather``: returns the values of all ranks, which may be silent for ``timeout_s``. Raises TrainingError if a rank
    works longer than ``limit_s``. Collective."""
    until, longest_s = time.monotonic() + limit_s, min(_LONGEST_S, timeout_s / 4)
    pause_s, since_failure = 0.05, 0
    while since_failure < _ROUNDS:
        done = not wait([work], pause_s).not_done
        failed = done and work.exception() is not None
        late = "" if done or time.monotonic() < until else stack.thread_at(work.thread) or "a thread that has ended"
        ranks = gather((done, failed, late))
        if all(done for done, _, _ in ranks):
            return
        if since_failure or any(failed for _, failed, _ in ranks):
            since_failure, pause_s = since_failure + 1, 0.05 * 2**since_failure
        elif overdue := next(((rank, late) for rank, (_, _, late) in enumerate(ranks) if late), None):
            raise _overdue(*overdue, doing, limit_s)
        else:
            pause_s = min(2 * pause_s, longest_s)


def _overdue(rank: int, where: str, doing: str, limit_s: float) -> TrainingError:
    """Return the error of all ranks because ``rank`` still works, in ``where``."""
    error = TrainingError(
        f"rank {rank} has not finished after {limit_s:g} s: {doing}, in {where}",
        hint="if this work is merely slow, raise runtime.work_timeout_s; otherwise look at the disk or the server that "
        "it uses",
    )
    error.origin_rank = rank
    return error
