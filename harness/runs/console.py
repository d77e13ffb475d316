"""Output: log records on rank 0's terminal and in each rank's log file, and progress as a bar or as lines: of training
in ``ProgressBar``, of anything else that takes long in ``working``."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from harness.distributed.threads import thread
from harness.errors import is_users
from harness.runs import layout

log = logging.getLogger("harness")

# Without a terminal: seconds after which new numbers, or else the position alone, are worth a line.
PLAIN_PERIOD_S, SILENT_S = 10.0, 30.0
LONG_S = 2.0  # of a step that a stop has to wait for
WORK_S = 2.0  # after which other work shows itself
_REDRAWN_S = 0.5  # between two looks at that work on a terminal
OF_NODE = {"of_node": True}  # of records about a machine: that it joined, and how it ended
IN_FILE = {"in_file": True}  # of records that only the log file has
COLUMNS = 80  # of a terminal that does not tell its width, as in docker and kubectl
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"


_shown_by: int | None = None  # the process whose work is shown: not one that it has forked


class _ProgressBarHandler(logging.Handler):
    """Writes log records above the progress bar instead of into it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)
        sys.stderr.flush()


class _Line(logging.Formatter):
    """A message after the time of day. Errors, and lines of a list ("%14s: %s"), stand alone."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).rstrip()  # a warning ends with a line break
        if record.levelno >= logging.ERROR or str(record.msg).startswith("%14s"):
            return text
        return f"{self.formatTime(record, '%H:%M:%S')} {text}"


class _LogFile(logging.FileHandler):
    """The log file of a rank. A record that cannot be written, as on a full disk, is lost: logging would fill the
    terminal with tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def to_terminal(rank: int, of_node: bool = False) -> None:
    """Log to the terminal: rank 0 everything without the extra ``IN_FILE``, other ranks only errors, with the number
    of the rank. ``of_node``: this rank is the first of its machine, and also says what has the extra ``OF_NODE``."""
    show_work(rank)
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    handler = _ProgressBarHandler()
    if rank != 0:
        handler.addFilter(lambda record: record.levelno >= logging.ERROR or of_node and hasattr(record, "of_node"))
    handler.addFilter(lambda record: not hasattr(record, "in_file"))
    handler.setFormatter(_Line() if rank == 0 else logging.Formatter(f"rank {rank}: %(message)s"))
    log.addHandler(handler)


def show_work(rank: int = 0) -> None:
    """Let ``working`` show progress, on rank 0."""
    global _shown_by
    _shown_by = os.getpid() if rank == 0 else None


@dataclass
class Work:
    """The progress of a piece of work."""

    what: str
    unit: str = ""
    done: int = 0
    total: int = 0
    """0: not known."""

    def describe(self) -> str:
        of = f" of {self.total:,}" if self.total else ""
        return f"{self.what}: {self.done:,}{of} {self.unit}" if self.unit else self.what


@contextmanager
def working(doing: str, unit: str = "", total: int = 0, measure: Callable[[], int] | None = None) -> Iterator[Work]:
    """Show that ``doing`` is done in this context, and how far it is, if that takes longer than WORK_S: as a bar on a
    terminal, otherwise as a line and then one every SILENT_S. The body adds to ``done``, or ``measure`` returns it."""
    work, ended = Work(doing, unit, 0, total), threading.Event()
    if os.getpid() != _shown_by:
        yield work
        return

    def show() -> None:
        bar, began, pause = None, time.monotonic(), WORK_S
        while not ended.wait(pause):
            if measure is not None:
                with suppress(OSError):
                    work.done = measure()
            text = f"{work.describe()}, {in_words(time.monotonic() - began)}"
            if sys.stderr.isatty():
                if bar is None:
                    shape = _BAR if work.total else "{desc}"
                    bar = tqdm(total=work.total, leave=False, file=sys.stderr, bar_format=shape, ncols=_columns())
                bar.set_description_str(doing if work.total else text, refresh=False)
                bar.n = work.done
                bar.refresh()
                pause = _REDRAWN_S
            else:
                _log_or_print(text)
                pause = SILENT_S
        if bar is not None:
            bar.close()

    shower = thread(show, "harness-work")
    shower.start()
    try:
        yield work
    finally:
        ended.set()
        shower.join()


def _log_or_print(text: str) -> None:
    """Log ``text``, or print it where the command does not log to the terminal."""
    if log.handlers:
        log.info("%s", text)
    else:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def to_file(folder: Path, rank: int) -> None:
    """Log everything, including Python warnings, to ``folder/rank-N.log`` too. Rank 0 also shows the warnings of the
    user's own code, one for each line of it."""
    folder.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(folder / layout.rank_log(rank), encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    logging.captureWarnings(True)
    warnings = logging.getLogger("py.warnings")
    warnings.propagate = False
    warnings.handlers = [handler]
    if rank == 0:
        bar_handler, process, locations = _ProgressBarHandler(), os.getpid(), set[str]()

        def is_new(record: logging.LogRecord) -> bool:
            """Return True for the first warning of a line, FILE:LINE: KIND: TEXT, but not in a loader worker."""
            location = record.getMessage().split(": ", 1)[0]
            if os.getpid() != process or location in locations or not is_users(location):
                return False
            locations.add(location)
            return True

        bar_handler.addFilter(is_new)
        bar_handler.setFormatter(_Line())
        warnings.addHandler(bar_handler)


class ProgressBar:
    """Shows progress on rank 0: of an epoch, with the time left of the whole run, and of an evaluation.

    A bar on a terminal; otherwise log lines: one after the first step, one with the first numbers, then every few
    seconds, however long a step is.
    """

    def __init__(self, rank: int, total_steps: int = 0) -> None:
        """``total_steps``: of the run; 0 where there is none."""
        self._bar: Any = None
        self._shows, self._of_run, self._total_steps = rank == 0, total_steps > 0, total_steps
        self._plain_at = -math.inf  # so that the first step is due
        self._began: tuple[float, int] | None = None  # when the first step of this process had ended, and its number
        self._step = 0  # of the run
        self._text, self._written = "", False  # the newest numbers, and whether a line has them
        self._where, self._unit, self._done, self._of = "", "step", 0, 0  # a loop of the user's own may open nothing
        self._mark: float | None = None  # when the last step or batch ended
        self._lasted: dict[str, float] = {}  # seconds, by unit

    def start(self, epoch: str, step: int) -> None:
        """Begin to show an epoch, from the ``step`` of the run on."""
        self._step = step
        self.open(epoch, "step", step, self._total_steps)

    def open(self, where: str, unit: str, done: int, total: int) -> None:
        """Begin to show anything else, such as an evaluation. Where there is no run, its end is what is left."""
        if not self._of_run:
            self._began, self._step, self._total_steps = None, done, total
        self._where, self._unit, self._done, self._of = where, unit, done, total
        self._mark = time.monotonic()
        if self._shows and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, desc=where, leave=False, file=sys.stderr, bar_format=_BAR,
                             ncols=_columns(), dynamic_ncols=bool(_width()))  # fmt: skip

    def step(self) -> None:
        """Count a step of the epoch, or a batch of the evaluation."""
        if not self._shows:
            return
        self._done += 1
        now = time.monotonic()
        if self._mark is not None:
            self._lasted[self._unit] = now - self._mark
        self._mark = now
        if self._unit == "step" or not self._of_run:
            self._step += 1
            self._began = self._began or (now, self._step)
        if self._bar is not None:
            self._bar.set_postfix_str(self._described(now), refresh=False)
            self._bar.update()
        elif now - self._plain_at > SILENT_S:
            self._write(now)

    def show(self, text: str) -> None:
        """Show ``text``, the newest numbers and their steps, next to the bar, or once as a line."""
        period = PLAIN_PERIOD_S if self._text else 0.0
        self._text, self._written = text, False
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(self._described(now), refresh=False)
        elif self._shows and self._where and now - self._plain_at >= period:
            self._write(now)

    def rest(self) -> str:
        """Return what is left of the current step or batch, in words; empty if it is short. Callable from any
        thread."""
        unit, mark = self._unit, self._mark
        if mark is None:
            return ""
        spent = time.monotonic() - mark
        total = self._lasted.get(unit, 0.0)
        if max(spent, total) < LONG_S:
            return ""
        time_text = f"about {in_words(total - spent)}" if spent < total else f"{in_words(spent)} so far"
        return f"after this {unit} ({time_text})"

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _write(self, now: float) -> None:
        self._plain_at = now
        position = f"{self._where}  {self._unit} {self._done}/{self._of}"
        log.info("%s", "  ".join(filter(None, (position, self._described(now)))))
        self._written = self._written or self._unit == "step"

    def _described(self, now: float) -> str:
        left_s = self._left_s(now)
        left_text = "" if left_s is None else f"{in_words(left_s)} left"
        text = "" if self._unit != "step" or self._written else self._text
        return "  ".join(filter(None, (text, left_text)))

    def _left_s(self, now: float) -> float | None:
        """Return the seconds left of the run at this process's pace so far, evaluations and checkpoints included."""
        if self._began is None or self._step <= self._began[1] or not self._total_steps:
            return None
        since, first = self._began
        return (now - since) / (self._step - first) * max(0, self._total_steps - self._step)


def in_words(seconds: float) -> str:
    """Return a duration such as "45 s", "12 min" or "3 h 20 min"."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _width() -> int:
    """Return the columns of the terminal; 0 if it does not tell."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns
    return 0


def _columns() -> int | None:
    """Return the width for tqdm: None if it can ask the terminal."""
    return None if _width() else COLUMNS
