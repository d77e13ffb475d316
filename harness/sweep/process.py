"""A trial that runs: a process of its own, told apart from all others by its run folder and its log.

It never outlives the sweep: when the sweep is gone, by whatever way, the kernel asks it to stop, and it ends with a
checkpoint. And nothing of it outlives it: what a trial that was killed leaves behind comes to the sweep, which ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from harness.distributed.stack import signal_name
from harness.errors import EXIT_DONE, EXIT_STOPPED
from harness.runs import layout
from harness.runs.files import identity
from harness.sweep.space import typed

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_ORPHAN_S = 30.0  # for what a killed trial left behind, to end by itself with a checkpoint

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
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=dict(environ),
                pass_fds=keep, preexec_fn=_ends_with(os.getpid()), start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Ask it to end with a checkpoint."""
        self.asked = True
        self._process.send_signal(signal.SIGTERM)  # does nothing to one that has ended

    def kill(self) -> None:
        """End it at once, and with it all it started (``ended`` sees to that)."""
        self.asked = self.killed = True
        self._process.kill()

    def wait(self, timeout_s: float) -> None:
        """Until it has ended; it is killed if that takes longer."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()

    def ended(self) -> tuple[How, str] | None:
        """None while it runs; then how it ended, and what is to be said of that. Nothing of it is left then."""
        code = self._process.poll()
        if code is None:
            return None
        if code == EXIT_DONE:
            return "done", ""
        if code < 0:
            return "interrupted", f"killed by {signal_name(-code)}"
        failure = self._reported()
        if code == EXIT_STOPPED:
            return "interrupted", "stopped with a checkpoint"
        if self.asked and not failure:
            return "interrupted", "stopped before its first checkpoint"
        if failure.get("error") in ("Killed", "Lost"):
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


def adopt_orphans() -> set[int]:
    """From now on what a process of ours leaves behind when it dies becomes ours (Linux; elsewhere ranks notice).
    Returns the children there are already."""
    _prctl(_SET_CHILD_SUBREAPER, 1)
    return _children()


def end_orphans(known: set[int], at_once: bool = False) -> None:
    """Ask all processes of ours that are not ``known`` to end, wait for them, and kill those that do not."""
    deadline = time.monotonic() + (0.0 if at_once else _ORPHAN_S)
    for pid in (orphans := _children() - known):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    while orphans := _alive(orphans | (_children() - known)):
        if time.monotonic() > deadline:
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _children() -> set[int]:
    found: set[int] = set()
    for listed in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= set(map(int, listed.read_text().split()))
    return found


def _alive(children: set[int]) -> set[int]:
    """Those that have not ended; the others are laid to rest."""
    alive = set()
    for pid in children:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                alive.add(pid)
    return alive


def _ends_with(parent: int) -> Any:
    """What a new process does first: have the kernel send it SIGTERM when ``parent`` dies."""

    def bind() -> None:
        _prctl(_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(EXIT_STOPPED)  # it died before it could be noticed

    return bind


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # looked up before any fork


def _prctl(option: int, value: int) -> None:
    if _libc is not None:
        _libc.prctl(option, value, 0, 0, 0)


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")
