"""A thread that brings parcels to a place which may be slow or away for a while, so that nobody waits for it.

Only the newest parcel counts: one that is still waiting when the next one comes is dropped. What fails is tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger("harness")

Parcel = TypeVar("Parcel")

MOST_PAUSE_S = 30.0  # between two attempts; the first pause is a second, and each one twice as long as that before
STALLED_S = 120.0  # without a sign of progress, after which nobody waits any longer


class Refused(Exception):
    """Raised by whoever brings a parcel where it must not be tried again."""


class Courier(Generic[Parcel]):
    """``bring`` is called in the thread, one parcel at a time; ``drop`` for each parcel that is done with."""

    def __init__(self, place: str, bring: Callable[[Parcel], None], drop: Callable[[Parcel], None]) -> None:
        self._place, self._bring, self._drop = place, bring, drop
        self._waiting: Parcel | None = None
        self._busy = False
        self._changed = threading.Condition()
        self._moved_at = time.monotonic()
        self.trouble: Exception | None = None  # what the newest attempt ended with, if not well
        self.refused = False
        self._thread = threading.Thread(target=self._run, name="harness-courier", daemon=True)

    def send(self, parcel: Parcel) -> None:
        """Have ``parcel`` brought, soon."""
        with self._changed:
            before, self._waiting = self._waiting, parcel
            self._changed.notify_all()
        if before is not None:
            self._drop(before)
        if not self._thread.is_alive() and not self.refused:
            self._thread.start()

    def moved(self) -> None:
        """A sign of progress."""
        self._moved_at = time.monotonic()

    def wait(self, most_s: float | None = None) -> bool:
        """Whether all has been brought, once it has or will not be: after ``most_s``, or STALLED_S without progress."""
        start = time.monotonic()
        self.moved()
        with self._changed:
            while self._busy or self._waiting is not None:
                now = time.monotonic()
                late = now - self._moved_at > STALLED_S if most_s is None else now - start > most_s
                if self.refused or late:
                    return False
                self._changed.wait(0.2)
        return not self.refused

    def _run(self) -> None:
        failures = 0
        while not self.refused:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                parcel, self._waiting, self._busy = self._waiting, None, True
            assert parcel is not None
            try:
                self._bring(parcel)
            except Exception as error:
                failures += 1
                self._failed(parcel, error, failures)
            else:
                if failures:
                    log.info("what is written arrives at %s again", self._place)
                failures, self.trouble = 0, None
                self._drop(parcel)
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _failed(self, parcel: Parcel, error: Exception, failures: int) -> None:
        self.trouble, self.refused = error, isinstance(error, Refused)
        if not self.refused and failures == 1:
            log.warning("what is written does not arrive at %s and will be tried again: %s", self._place, error)
        with self._changed:
            superseded = self._waiting is not None
            self._waiting, self._busy = self._waiting if superseded else parcel, False
            self._changed.notify_all()
        if superseded:
            self._drop(parcel)
        if not self.refused:
            time.sleep(min(MOST_PAUSE_S, 2.0 ** min(failures - 1, 10)))
