"""Output: log records on rank 0's terminal and in each rank's log file, and a progress bar on terminals."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from harness.runs import layout

log = logging.getLogger("harness")

PLAIN_PERIOD_S = 10.0  # between two progress lines if no terminal is attached


class _ProgressBarHandler(logging.Handler):
    """Writes log records above the progress bar instead of into it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)
        sys.stderr.flush()


class _LogFile(logging.FileHandler):
    """The log file of a rank. It ignores a full disk, which would fill the terminal with logging's tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def to_terminal(rank: int) -> None:
    """Log to the terminal: rank 0 everything, other ranks only errors, with the number of the rank."""
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    handler = _ProgressBarHandler(logging.INFO if rank == 0 else logging.ERROR)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    log.addHandler(handler)


def to_file(folder: Path, rank: int) -> None:
    """Log everything, including Python warnings, to ``folder/rank-N.log`` too."""
    folder.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(folder / layout.rank_log(rank), encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    logging.captureWarnings(True)
    warnings = logging.getLogger("py.warnings")
    warnings.propagate = False
    warnings.handlers = [handler]


class ProgressBar:
    """Progress of the epoch on rank 0: a bar on a terminal, otherwise a log line every few seconds."""

    def __init__(self, rank: int) -> None:
        self._bar: Any = None
        self._rank, self._plain_at = rank, time.monotonic()

    def start(self, epoch: int, epochs: int, done: int, steps: int) -> None:
        if self._rank == 0 and sys.stderr.isatty():
            self._bar = tqdm(
                total=steps, initial=done, desc=f"epoch {epoch + 1}/{epochs}", unit="step", leave=False, file=sys.stderr
            )
        self._where, self._done, self._steps = f"epoch {epoch + 1}/{epochs}", done, steps

    def step(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.update()

    def show(self, text: str) -> None:
        """Show ``text``, the newest numbers, next to the bar, or as a line."""
        due = self._rank == 0 and time.monotonic() - self._plain_at > PLAIN_PERIOD_S
        if self._bar is None and not due:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
        else:
            self._plain_at = time.monotonic()
            log.info("%s  step %d/%d  %s", self._where, self._done, self._steps, text)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
