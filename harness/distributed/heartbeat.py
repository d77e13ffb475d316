"""Signs of life of the ranks, through the store."""

from __future__ import annotations

import time
from threading import Lock

from harness.distributed.runtime import Runtime
from harness.distributed.stalls import ANSWER_S
from harness.distributed.store import LIMIT_S

_BEAT_S = 5.0  # between two heartbeats
_BUSY_S = ANSWER_S + LIMIT_S  # that the watchdog may need between two, to ask where the ranks are
_IN_ORDER = "ended"  # in place of a count of heartbeats: the rank has ended in order, maybe before others


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
        self._ended, self._publishing = False, Lock()

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
