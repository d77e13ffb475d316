"""The tools that mirror the record, each on a thread of its own: a slow one does not hold training up, and one that
fails is a warning and then off."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.config.schema import Config, flatten
from harness.errors import ConfigError, first_line
from harness.runs import layout
from harness.runs.files import finite, write_atomically
from harness.trackers.mirror import Facts, Line, Mirror, Sample
from harness.trackers.record import JsonLines, Nothing, Tracker

log = logging.getLogger("harness")

MAX_WAITING = 20_000  # lines; a tool that is so far behind will not catch up
CLOSE_S = 60.0  # for a tool to take what is waiting at the end of training
STOP_S = 10.0  # the same where the run was stopped or failed: a scheduler may be about to kill it
KEPT = (layout.CONFIG, layout.SUMMARY, layout.CONFUSION, layout.PREDICTIONS, layout.WEIGHTS)


def require(names: Sequence[str]) -> None:
    """Raises ConfigError for the first tool of ``trackers:`` that is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{name} is not installed",
                where="trackers",
                hint=f"type pip install 'apex-harness[{name}]' (or pip install {name}), or take it out of trackers",
            )


def make(record: Path, rank: int, config: Config, text: str) -> Tracker:
    """The tracker of a rank; ``text`` is the configuration as YAML. Raises ConfigError for a tool not installed."""
    if rank != 0:
        return Nothing()
    require(config.trackers)
    lines = JsonLines(record)
    if not config.trackers:
        return lines
    facts = _facts(record.parent, config, text)
    return Mirrored(record, lines, [Follower(name, facts) for name in dict.fromkeys(config.trackers)])


def _facts(folder: Path, config: Config, text: str) -> Facts:
    """``trackers.json`` keeps what the tools know this run by."""
    path = folder / layout.TRACKERS
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        run_id, started = str(kept["id"]), float(kept["started"])
    except (OSError, ValueError, KeyError, TypeError):
        run_id, started = secrets.token_hex(8), time.time()
        write_atomically(path, json.dumps({"id": run_id, "started": started}) + "\n")
    settings = flatten(config.model_dump(mode="json", by_alias=True))
    return Facts(config.name, run_id, started, folder, folder.parent, settings, text)


class Mirrored:
    """The record, and tools that follow it. They start when the record has been cut to where the run goes on from."""

    def __init__(self, path: Path, record: JsonLines, followers: list[Follower]) -> None:
        self._path, self._record, self._followers = path, record, followers

    def log(self, split: str, values: dict[str, Any]) -> None:
        self._record.log(split, values)
        for follower in self._followers:
            follower.log(finite({"split": split, **values}))

    def offset(self) -> int:
        return self._record.offset()

    def rewind(self, offset: int) -> None:
        self._record.rewind(offset)
        for follower in self._followers:
            follower.start(self._path, offset)

    def show(self, sample: Sample) -> None:
        for follower in self._followers:
            follower.show(sample)

    def close(self, done: bool = False) -> None:
        """Waits for the tools, a limited time."""
        self._record.close()
        files = [path for name in KEPT if (path := self._path.parent / name).exists()]
        for follower in self._followers:
            follower.finish(files, done)
        deadline = time.monotonic() + (CLOSE_S if done else STOP_S)
        for follower in self._followers:
            follower.join(max(0.0, deadline - time.monotonic()))


class Follower:
    """One tool on its thread. Nothing here raises: the first failure is one warning, and the tool is off then."""

    def __init__(self, name: str, facts: Facts) -> None:
        """Imports the tool, here in the main thread: loader workers are forked from it while the thread runs, and an
        import that is under way in another thread would stay locked in them for ever."""
        self.name, self._facts = name, facts
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._off, self._turning_off = threading.Event(), threading.Lock()
        self._mirror: Mirror | None = None
        self._thread = threading.Thread(target=self._run, name=f"harness-{name}", daemon=True)
        try:
            self._mirror = importlib.import_module(f"harness.trackers.{name}").Mirror()
        except Exception as error:
            self._fail(error)

    def start(self, path: Path, offset: int) -> None:
        if self._mirror is None or self._thread.is_alive():
            return
        mirror = self._mirror

        def begin() -> None:
            log.info("%14s: %s", self.name, mirror.start(self._facts, _lines(path, offset)))

        self._put(begin)
        self._thread.start()

    def log(self, line: Line) -> None:
        if self._mirror is not None:
            mirror = self._mirror
            self._put(lambda: mirror.log(line))

    def show(self, sample: Sample) -> None:
        if self._mirror is not None:
            mirror = self._mirror
            self._put(lambda: mirror.show(sample))

    def finish(self, files: list[Path], done: bool) -> None:
        if self._mirror is not None:
            mirror = self._mirror
            self._put(lambda: mirror.finish(files, done))
        self._put(None)

    def join(self, timeout_s: float) -> None:
        if self._thread.is_alive() and not self._off.is_set():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._turn_off(
                    f"has not taken everything within {timeout_s:.0f} s: what it shows is not whole; metrics.jsonl is"
                )

    def _put(self, call: Callable[[], None] | None) -> None:
        if self._off.is_set():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(RuntimeError(f"it is {MAX_WAITING} lines behind"))

    def _run(self) -> None:
        while not self._off.is_set():
            call = self._calls.get()
            if call is None:
                return
            try:
                call()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        reason = first_line(error, "no reason given")
        text = f"{type(error).__name__}: {reason} (metrics.jsonl has everything)"
        self._turn_off(f"is off for the rest of this start: {text}", error)

    def _turn_off(self, why: str, error: Exception | None = None) -> None:
        """The warning is out before ``_off`` says so: who sees it set waits for nothing more."""
        with self._turning_off:
            if self._off.is_set():
                return
            log.warning("tracker %s %s", self.name, why)
            log.debug("what %s raised", self.name, exc_info=error)
            self._off.set()
        with self._calls.mutex:
            self._calls.queue.clear()


def _lines(path: Path, offset: int) -> Iterator[Line]:
    """The lines of the record before ``offset``, which no longer change."""
    with open(path, "rb") as file:
        while file.tell() < offset and (line := file.readline()):
            yield json.loads(line)
