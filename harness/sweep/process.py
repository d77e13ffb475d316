"""A trial that runs: a process of its own, told apart from all others by its run folder and its log.

It never outlives the sweep: when the sweep is gone, by whatever way, the kernel asks it to stop, and it ends with a
checkpoint. And nothing of it outlives it: what a trial that was killed leaves behind comes to the sweep, which ends it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from harness.distributed.rank_exit import Cause
from harness.distributed.stack import signal_name
from harness.distributed.worker_group import Worker, WorkerGroup
from harness.errors import EXIT_DONE, EXIT_STOPPED
from harness.runs import layout
from harness.runs.files import identity
from harness.sweep.space import typed

How = Literal["done", "interrupted", "failed"]


def command(base: str, words: Sequence[str], name: str, output: Path) -> list[str]:
    """What trains the experiment ``base`` with the settings ``words`` into the run folder OUTPUT/NAME."""
    own = typed({"output": str(output), "name": name})
    return [sys.executable, "-m", "harness", "launch", "-c", base, *words, *own]


class Process:
    """A trial's process. ``ended`` is to be asked until it has an answer."""

    def __init__(self, command: Sequence[str], run: Path, environ: Mapping[str, str], keep: Sequence[int]) -> None:
        """``keep``: file descriptors that stay open as long as it lives."""
        self._run, self._log = run, run.with_name(f"{run.name}.log")
        run.parent.mkdir(parents=True, exist_ok=True)
        self._failure = identity(run / layout.FAILURE)
        self.asked = self.killed = False
        with open(self._log, "ab") as log:
            self._said_before = log.tell()
        # Without a grace period of its own: the runner kills trials that do not stop.
        self._group = WorkerGroup(
            {0: Worker(command, environ, output=self._log)}, math.inf, stdin=subprocess.DEVNULL, pass_fds=keep,
            ends_with_parent=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._group.processes[0].pid

    def stop(self) -> None:
        """Ask it to end with a checkpoint."""
        if not self.asked:
            self.asked = True
            self._group.stop()

    def kill(self) -> None:
        """End it at once, and with it all it started (``ended`` sees to that)."""
        self.asked = self.killed = True
        self._group.kill()

    def wait(self, timeout_s: float) -> None:
        """Until it has ended; it is killed if that takes longer."""
        try:
            self._group.processes[0].wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._group.wait()

    def ended(self) -> tuple[How, str] | None:
        """None while it runs; then how it ended, and what is to be said of that. Nothing of it is left then."""
        if not self._group.poll():
            return None
        code = self._group.exits[0]
        if code == EXIT_DONE:
            return "done", ""
        if code < 0:
            return "interrupted", f"killed by {signal_name(-code)}"
        failure = self._reported()
        if code == EXIT_STOPPED:
            return "interrupted", "stopped with a checkpoint"
        if self.asked and not failure:
            return "interrupted", "stopped before its first checkpoint"
        if failure.get("cause") in (Cause.SIGNAL, Cause.NODE_LOST):
            return "interrupted", _first_line(str(failure.get("message"))) or "a rank was killed"
        return "failed", _first_line(str(failure.get("message", ""))) or self._last_error() or f"exit code {code}"

    def _reported(self) -> dict[str, Any]:
        """The failure that this start left, if any."""
        path = self._run / layout.FAILURE
        if identity(path) == self._failure:
            return {}
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(path.read_text(encoding="utf-8"))
            return content if isinstance(content, dict) else {}
        return {}

    def _last_error(self) -> str:
        """What this start said last of an error, or said last at all."""
        with contextlib.suppress(OSError), open(self._log, "rb") as log:
            log.seek(self._said_before)
            lines = log.read().decode(errors="replace").strip().splitlines()
            errors = [index for index, line in enumerate(lines) if line.startswith("error: ")]
            if errors:
                return " ".join(line.strip() for line in lines[errors[-1] : errors[-1] + 2]).removeprefix("error: ")
            return next((line.strip() for line in reversed(lines) if re.search(r"Error\b", line)), "") or "".join(
                lines[-1:]
            )
        return ""


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")
