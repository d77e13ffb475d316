"""A look at the evaluation rows during the first epoch, so that a damaged one does not end a run only after it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import wait
from contextlib import suppress

from harness.distributed.threads import Background
from harness.training.task import SupportsLook

_NICENESS = 15  # of the thread, which must not slow the training down
_END_S = 10.0  # for the thread to end, which may wait for a disk


class FirstLook:
    """Reads evaluation rows in a thread, which the first ``poll`` starts: by then the loader workers are there, and no
    process is forked while the thread holds a lock."""

    def __init__(self, task: SupportsLook | None = None, rows: range = range(0)) -> None:
        """Without a ``task``, it reads nothing."""
        self._task, self._rows = task, rows
        self._ended = threading.Event()
        self._work: Background[None] | None = None
        self._is_sound = False

    def _look(self) -> None:
        with suppress(OSError, AttributeError):  # other systems have no niceness of a thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        assert self._task is not None
        self._task.look(self._rows, self._ended.is_set)

    def poll(self) -> None:
        """Raise the DataError of the thread, if it has found a damaged row so far."""
        if self._task is None or self._ended.is_set() or self._is_sound:
            return
        if self._work is None:
            self._work = Background(self._look, "harness-first-look")
        elif self._work.done():
            self._work.result()
            self._is_sound = True

    def end(self) -> None:
        """End the thread, if it still runs: an evaluation now reads the rows, or the run ends."""
        self._ended.set()
        work, self._work = self._work, None
        if work is not None:
            wait([work], _END_S)
