"""The sweep as a table: redrawn in place on a terminal and printed at the end; single lines without a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from harness.errors import plural
from harness.tools.sweep.plan import Plan
from harness.tools.sweep.progress import TrialProgress
from harness.tools.sweep.results import ranked
from harness.tools.sweep.space import columns, spelled

if TYPE_CHECKING:
    from harness.tools.sweep.study import SweepTrial

_DRAW_S = 0.5  # interval of redrawing
_LINE_S = 60.0  # interval of lines about running trials, without a terminal
_UP, _CLEAR = "\x1b[{}A", "\x1b[J"
_MAX_ERROR = 60  # characters of an error in the table


def table(trials: Sequence[SweepTrial], plan: Plan, seen: Mapping[int, TrialProgress], width: int) -> list[str]:
    """The lines of the table with its heading, one row per trial in the given order. ``seen``: progress by number."""
    varied = columns([trial.settings for trial in trials] or [planned.settings for planned in plan.trials])
    heading = ["trial", *varied.values(), "state", plan.metric, "epoch", "seconds", ""]
    rows = [heading, *(_row(trial, list(varied), seen.get(trial.number), plan) for trial in trials)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(heading))]
    after_state = len(varied) + 2
    right = {0, after_state, after_state + 1, after_state + 2}
    right |= {
        place
        for place, key in enumerate(varied, 1)
        if all(isinstance(trial.settings.get(key), int | float) for trial in trials)
    }
    return [
        "  ".join(
            cell.rjust(size) if place in right else cell.ljust(size)
            for place, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()[:width]
        for row in rows
    ]


def _row(trial: SweepTrial, keys: Sequence[str], progress: TrialProgress | None, plan: Plan) -> list[str]:
    error = " ".join((trial.error or "").split())
    value = progress.value if progress and trial.state == "running" else trial.value
    epochs = trial.settings.get("train.epochs", plan.config_like(trial.settings).train.epochs)
    return [
        f"{trial.number:04d}",
        *(_cell(trial.settings.get(key)) for key in keys),
        trial.state,
        "" if value is None else f"{value:.5g}",
        f"{progress.epoch}/{epochs}" if progress and progress.step else "",
        f"{progress.wall_s:.0f}" if progress and progress.wall_s else "",
        error if len(error) <= _MAX_ERROR else f"{error[: _MAX_ERROR - 1]}…",
    ]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else spelled(value)


def counts(trials: Sequence[SweepTrial], total: int) -> str:
    """The number of trials in each state, as one line."""
    states = [trial.state for trial in trials]
    found = [f"{states.count(state)} {state}" for state in ("running", "finished", "pruned", "failed")]
    return f"{plural(total, 'trial')}: {', '.join(text for text in found if text[0] != '0') or 'none finished yet'}"


class Display:
    """Shows a running sweep on ``stream``."""

    def __init__(self, plan: Plan, stream: TextIO = sys.stderr) -> None:
        self._plan, self._stream = plan, stream
        self._live = stream.isatty()
        self._num_drawn = 0  # lines of the table on the terminal, to be overwritten
        self._next = 0.0 if self._live else time.monotonic() + _LINE_S

    def message(self, text: str) -> None:
        """Print a line that stays, above the table."""
        self._clear()
        print(text, file=self._stream, flush=True)
        if self._live:
            self._next = 0.0

    def update(self, trials: Sequence[SweepTrial], seen: Mapping[int, TrialProgress]) -> None:
        """Show the state of the sweep if the interval has passed."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + (_DRAW_S if self._live else _LINE_S)
        if self._live:
            self._draw(trials, seen)
            return
        for trial in trials:
            if trial.state == "running" and (progress := seen.get(trial.number)) and progress.step:
                loss = "" if progress.loss is None else f", loss {progress.loss:.4g}"
                self.message(f"trial {trial.number:04d}: epoch {progress.epoch}, step {progress.step}{loss}")

    def close(self) -> None:
        """Remove the table from the terminal."""
        self._clear()

    def _draw(self, trials: Sequence[SweepTrial], seen: Mapping[int, TrialProgress]) -> None:
        width, height = shutil.get_terminal_size()
        running = [trial for trial in trials if trial.state == "running"]
        others = [trial for trial in ranked(trials, self._plan.direction) if trial.state != "running"]
        rows = table([*running, *others], self._plan, seen, width - 1)
        if len(rows) > (most := max(2, height - 3)):
            rows = [*rows[: most - 1], f"... and {len(rows) - most + 1} more"]
        self._clear()
        self._stream.write("\n".join([counts(trials, self._plan.total)[: width - 1], *rows]) + "\n")
        self._stream.flush()
        self._num_drawn = len(rows) + 1

    def _clear(self) -> None:
        if self._num_drawn:
            self._stream.write(_UP.format(self._num_drawn) + "\r" + _CLEAR)
            self._stream.flush()
            self._num_drawn = 0
