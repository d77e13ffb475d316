"""A thread that uploads what training writes, so that training does not wait for a network."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from harness.distributed.threads import thread

log = logging.getLogger("harness")

MAX_PAUSE_S = 30.0  # between two attempts to upload; the first pause is a second, and each is twice the one before
MAX_FAILURES = 10  # while ``wait`` waits


class UploadTakenOver(Exception):
    """Another start owns the run; do not upload anything more."""


class Uploader:
    """A thread that calls ``upload`` once per request, or once for several requests during an upload, so that training
    does not wait. ``upload`` copies what is current when it is called, so a failed attempt is superseded by the next.
    ``where``: the target, for messages."""

    def __init__(self, where: str, upload: Callable[[], None]) -> None:
        self._where, self._upload = where, upload
        self._changed = threading.Condition()
        self._failures = 0  # of all attempts
        self.error: Exception | None = None  # of the newest attempt
        self.taken_over = False
        self._requests = self._done = 0  # the number of requests, and of those whose files are uploaded
        self._thread = thread(self._run, "harness-upload")

    def request(self) -> None:
        """Ask for an upload of the folder as it is now, and return at once."""
        with self._changed:
            self._requests += 1
            self._changed.notify_all()
            if not self._thread.is_alive() and not self.taken_over:
                self._thread.start()

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait until everything requested is uploaded; return False if that fails: after ``limit_s``, by default after
        MAX_FAILURES attempts."""
        with self._changed:
            most = self._failures + (MAX_FAILURES if limit_s is None else math.inf)
            self._changed.wait_for(
                lambda: self.taken_over or self._done == self._requests or self._failures >= most, limit_s
            )
            return not self.taken_over and self._done == self._requests

    def _run(self) -> None:
        in_a_row = 0
        while not self.taken_over:
            with self._changed:
                self._changed.wait_for(lambda: self._done < self._requests)
                requests = self._requests
            try:
                self._upload()
            except Exception as error:
                in_a_row += 1
                if in_a_row == 1 and not isinstance(error, UploadTakenOver):
                    log.warning("upload to %s failed and will be retried: %s", self._where, error)
                with self._changed:
                    self.error, self.taken_over = error, isinstance(error, UploadTakenOver)
                    self._failures += 1
                    self._changed.notify_all()
                if not self.taken_over:
                    time.sleep(min(MAX_PAUSE_S, 2.0 ** min(in_a_row - 1, 10)))
            else:
                if in_a_row:
                    log.info("upload to %s works again", self._where)
                with self._changed:
                    in_a_row, self.error, self._done = 0, None, requests
                    self._changed.notify_all()
