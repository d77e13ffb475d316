"""Forwarding of the log to one tracker on its own thread: a slow tracker does not delay training."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.config import plugins
from harness.distributed.threads import thread
from harness.errors import first_line
from harness.trackers.base import Entry, RunInfo, Sample, Tracker

log = logging.getLogger("harness")

MAX_QUEUED = 20_000  # entries; a tracker that is this far behind will not catch up


class Forwarder:
    """One tracker on its thread. Methods do not raise: the first failure logs one warning and turns the tracker off."""

    def __init__(self, name: str, info: RunInfo) -> None:
        """Imports the tracker in the calling thread: data loader workers are forked while the tracker's thread runs,
        and an import lock held by that thread would stay locked in them forever."""
        self.name, self._info = name, info
        self.cpu_s = 0.0  # of the thread, after its last call
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(MAX_QUEUED)
        self._off, self._turning_off = threading.Event(), threading.Lock()
        self._tracker: Tracker | None = None
        self._thread = thread(self._run, f"harness-{name}")
        try:
            self._tracker = plugins.find("tracker", name, "trackers")()
        except Exception as error:
            self._fail(error)

    def start(self, path: Path, offset: int) -> None:
        """Start the tracker with the entries in the first ``offset`` bytes of the log at ``path``."""
        tracker = self._tracker
        if tracker is None or self._thread.is_alive():
            return
        self._put(lambda: log.info("%14s: %s", self.name, tracker.start(self._info, _entries(path, offset))))
        self._thread.start()

    def log(self, entry: Entry) -> None:
        if tracker := self._tracker:
            self._put(lambda: tracker.log(entry))

    def show(self, sample: Sample) -> None:
        if tracker := self._tracker:
            self._put(lambda: tracker.show(sample))

    def finish(self, files: list[Path], done: bool) -> None:
        if tracker := self._tracker:
            self._put(lambda: tracker.finish(files, done))
        self._put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the queued calls, at most ``timeout_s``."""
        if self._thread.is_alive() and not self._off.is_set():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._turn_off(
                    f"did not process everything within {timeout_s:.0f} s, so its copy is incomplete "
                    "(metrics.jsonl is complete)"
                )

    def _put(self, call: Callable[[], object] | None) -> None:
        if self._off.is_set():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(RuntimeError(f"it fell {MAX_QUEUED} entries behind"))

    def _run(self) -> None:
        while not self._off.is_set():
            call = self._calls.get()
            if call is None:
                return
            try:
                call()
            except Exception as error:
                self._fail(error)
            self.cpu_s = time.thread_time()

    def _fail(self, error: Exception) -> None:
        reason = first_line(error, "no reason given")
        text = f"{type(error).__name__}: {reason} (metrics.jsonl is complete)"
        self._turn_off(f"is off until the next start: {text}", error)

    def _turn_off(self, reason: str, error: Exception | None = None) -> None:
        """Log the warning before setting ``_off``: a thread that finds it set may exit at once."""
        with self._turning_off:
            if self._off.is_set():
                return
            log.warning("tracker %s %s", self.name, reason)
            log.debug("exception of tracker %s", self.name, exc_info=error)
            self._off.set()
        with self._calls.mutex:
            self._calls.queue.clear()


def _entries(path: Path, offset: int) -> Iterator[Entry]:
    """Yield the entries before ``offset``, which no longer change."""
    with open(path, "rb") as file:
        while file.tell() < offset and (line := file.readline()):
            yield json.loads(line)
