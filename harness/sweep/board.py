"""What a person sees while a sweep runs: a table that is drawn anew in place, or lines where there is no terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from harness.sweep import table
from harness.sweep.plan import Plan
from harness.sweep.progress import Progress
from harness.sweep.results import ranked
from harness.sweep.study import Trial

_DRAW_S = 0.5  # between two drawings
_LINE_S = 60.0  # between two lines on what is running, without a terminal
_UP, _CLEAR = "\x1b[{}A", "\x1b[J"


class Board:
    """Shows a sweep on ``stream``."""

    def __init__(self, plan: Plan, stream: TextIO = sys.stderr) -> None:
        self._plan, self._stream = plan, stream
        self._live = stream.isatty()
        self._drawn = 0  # lines that are on the terminal, and are drawn over
        self._next = 0.0 if self._live else time.monotonic() + _LINE_S

    def say(self, text: str) -> None:
        """A line that stays, above the table."""
        self._wipe()
        print(text, file=self._stream, flush=True)
        if self._live:
            self._next = 0.0

    def show(self, trials: Sequence[Trial], seen: Mapping[int, Progress]) -> None:
        """The sweep as it is now, if it is time for that."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + (_DRAW_S if self._live else _LINE_S)
        if self._live:
            self._draw(trials, seen)
        else:
            for trial in trials:
                if trial.state == "running" and (progress := seen.get(trial.number)) and progress.step:
                    loss = "" if progress.loss is None else f", loss {progress.loss:.4g}"
                    self.say(f"trial {trial.number:04d}: epoch {progress.epoch}, step {progress.step}{loss}")

    def close(self) -> None:
        """Leave the terminal to what comes next."""
        self._wipe()

    def _draw(self, trials: Sequence[Trial], seen: Mapping[int, Progress]) -> None:
        width, height = shutil.get_terminal_size()
        running = [trial for trial in trials if trial.state == "running"]
        others = [trial for trial in ranked(trials, self._plan.direction) if trial.state != "running"]
        rows = table.lines([*running, *others], self._plan, seen, width - 1)
        text = [table.counts(trials, self._plan.total)[: width - 1], *table.shortened(rows, height - 3)]
        self._wipe()
        self._stream.write("\n".join(text) + "\n")
        self._stream.flush()
        self._drawn = len(text)

    def _wipe(self) -> None:
        if self._drawn:
            self._stream.write(_UP.format(self._drawn) + "\r" + _CLEAR)
            self._stream.flush()
            self._drawn = 0
