"""A background thread that uploads, so that training does not wait, and retries until the store answers again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from harness.distributed.threads import thread

log = logging.getLogger("harness")

MAX_PAUSE_S = 30.0  # between two attempts; the first pause is a second, and each is twice the one before
STALLED_S = 120.0  # without progress: then ``wait`` gives up
MAX_FAILURES = 10  # while ``wait`` waits: each may transfer the same part of a file again, which looks like progress


class UploadTakenOver(Exception):
    """Another start owns the run; do not upload anything more."""


class Uploader:
    """Calls ``upload`` once per request, or once for several requests during an upload. It copies what is current
    when it is called, so a failed attempt is superseded by the next. ``where``: the target, for messages."""

    def __init__(self, where: str, upload: Callable[[], None]) -> None:
        self._where, self._upload = where, upload
        self._requested = self._busy = False
        self._changed = threading.Condition()
        self._progress_at = time.monotonic()
        self._failures = 0  # of all attempts so far
        self.error: Exception | None = None  # of the newest attempt
        self.taken_over = False
        self._thread = thread(self._run, "harness-upload")

    def request(self) -> None:
        with self._changed:
            self._requested = True
            self._changed.notify_all()
            if not self._thread.is_alive() and not self.taken_over:
                self._thread.start()

    def progress(self) -> None:
        self._progress_at = time.monotonic()

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait until everything requested is uploaded; return False if that fails: after ``limit_s``, by default after
        STALLED_S without progress or MAX_FAILURES failed attempts."""
        start, failures = time.monotonic(), self._failures
        self.progress()
        with self._changed:
            while self._busy or self._requested:
                now = time.monotonic()
                if limit_s is None:
                    late = now - self._progress_at > STALLED_S or self._failures - failures >= MAX_FAILURES
                else:
                    late = now - start > limit_s
                if self.taken_over or late:
                    return False
                self._changed.wait(0.2)
        return not self.taken_over

    def _run(self) -> None:
        failures = 0
        while not self.taken_over:
            with self._changed:
                self._changed.wait_for(lambda: self._requested)
                self._requested, self._busy = False, True
            try:
                self._upload()
            except Exception as error:
                failures += 1
                self._failures += 1
                if failures == 1 and not isinstance(error, UploadTakenOver):
                    log.warning("upload to %s failed and will be retried: %s", self._where, error)
                self.error, self.taken_over = error, isinstance(error, UploadTakenOver)
                self._done(retry=True)
                if not self.taken_over:
                    time.sleep(min(MAX_PAUSE_S, 2.0 ** min(failures - 1, 10)))
            else:
                if failures:
                    log.info("upload to %s works again", self._where)
                failures, self.error = 0, None
                self._done()

    def _done(self, retry: bool = False) -> None:
        with self._changed:
            self._requested, self._busy = self._requested or retry, False
            self._changed.notify_all()
