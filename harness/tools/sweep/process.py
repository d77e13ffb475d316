"""A running trial: its process, a ``harness launch`` with its own run folder and log, and its evaluations and
result.

The process never outlives the sweep: if the sweep dies, the kernel sends the trial SIGTERM, and it exits with a
checkpoint. Orphans of a killed trial are adopted and ended by the sweep (harness.distributed.processes).
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.config.merge import typed
from harness.distributed import signals
from harness.distributed.rank_exit import Cause
from harness.distributed.worker_group import Worker, WorkerGroup
from harness.errors import EXIT_DONE, EXIT_STOPPED, EXITS_BY_SIGNAL
from harness.runs import exit_files, layout, reader
from harness.runs.followed import FollowedFile, read_entry


@dataclass(frozen=True)
class TrialEnd:
    """How a trial's process ended, and why if it is not done."""

    how: Literal["done", "interrupted", "failed"]
    why: str = ""


def launch_words(base: str, words: Sequence[str], folder: Path) -> list[str]:
    """Return the words after ``harness`` that train the experiment ``base`` with the settings ``words`` into the run
    folder ``folder``."""
    return ["launch", "-c", base, *words, *typed({"output": str(folder.parent), "name": folder.name})]


def launch_command(base: str, words: Sequence[str], folder: Path) -> list[str]:
    return [sys.executable, "-m", "harness", *launch_words(base, words, folder)]


class TrialProcess:
    """A started trial. Poll ``ended`` until it returns a result."""

    def __init__(self, command: Sequence[str], folder: Path, environ: Mapping[str, str], keep: Sequence[int]) -> None:
        """Start the trial. ``keep``: file descriptors that stay open as long as it runs."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._exit_files = exit_files.ExitFiles(folder)
        self._early = folder.with_name(f"{folder.name}.failure.json").absolute()
        self._early.unlink(missing_ok=True)
        environ = {**environ, exit_files.EARLY: str(self._early)}
        self._stopped = False
        self.killed = False
        # Without a grace period of its own: the runner kills trials that do not stop.
        self._group = WorkerGroup(
            {0: Worker(command, environ, output=folder.with_name(f"{folder.name}.log"))}, math.inf,
            stdin=subprocess.DEVNULL, pass_fds=keep, ends_with_parent=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._group.popens[0].pid

    def stop(self) -> None:
        """Ask the trial to exit with a checkpoint."""
        if not self._stopped:
            self._stopped = True
            self._group.stop()

    def kill(self) -> None:
        """Kill the trial. The runner ends the orphans that it leaves."""
        self._stopped = self.killed = True
        self._group.kill()

    def wait(self, timeout_s: float) -> None:
        """Wait until the trial has exited; kill it after ``timeout_s``."""
        until = time.monotonic() + timeout_s
        self._group.wait(lambda: self.kill() if time.monotonic() > until else None)

    def ended(self) -> TrialEnd | None:
        """Return None while the trial runs."""
        if not self._group.poll():
            return None
        code, failure = self._group.exits[0], self._exit_files.first()
        message = next(iter(failure.message.strip().splitlines()), "") if failure else ""
        if code == EXIT_DONE:
            return TrialEnd("done")
        if code < 0:
            return TrialEnd("interrupted", f"killed by {signals.signal_name(-code)}")
        if code == EXIT_STOPPED:
            return TrialEnd("interrupted", "stopped with a checkpoint")
        if code in EXITS_BY_SIGNAL or (self._stopped and not failure):
            return TrialEnd("interrupted", "stopped before its first checkpoint")
        if failure and failure.cause in (Cause.SIGNAL, Cause.NODE_LOST):
            return TrialEnd("interrupted", message or "a rank was killed")
        if early := None if failure else exit_files.read_record(self._early):
            message = " ".join([*early.message.split(), *(["->"] if early.hint else []), *early.hint.split()])
        return TrialEnd("failed", message or f"exit code {code}")


# Evaluations and result, read from the run folder while the trial writes it


class TrialLogReader:
    """Follows the log of a run. A resumed run rewrites the end of its log: then everything is read again."""

    def __init__(self, run: Path, metric: str) -> None:
        self._log = FollowedFile(run / layout.METRICS, rewritten=self._forget)
        self._metric = metric
        self._forget()

    def _forget(self) -> None:
        self.step = 0
        self.evaluations: dict[int, float] = {}  # epoch -> metric of its first evaluation

    def read(self) -> None:
        """Read the lines written since the last call."""
        while lines := self._log.read():
            for line in filter(None, map(read_entry, lines)):
                self.step = line.get("step", self.step)
                value = line.get(self._metric)
                if line.get("split") == "eval" and isinstance(value, int | float) and math.isfinite(value):
                    self.evaluations.setdefault(line.get("epoch", 0), float(value))


def final_value(run: Path, metric: str, direction: str) -> float | None:
    """Return the best value of ``metric`` in the finished run ``run``; None if it has none or is not finished."""
    summary = reader.read(run).summary
    values = [
        evaluation[metric]
        for evaluation in [*summary.get("history", ()), summary.get("evaluation") or {}]
        if isinstance(evaluation.get(metric), int | float)
    ]
    if not summary.get("finished") or not values:
        return None
    return float(max(values) if direction == "maximize" else min(values))
