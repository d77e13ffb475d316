"""Process control that Python has no function for, on Linux: death signals, orphans, sessions. Elsewhere a no-op."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.errors import EXIT_STOPPED

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_POLL_S = 0.05
_KILLED_S = 10.0  # for a process that was killed to be gone
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # loaded before any fork


def terminated_with_parent() -> Callable[[], None] | None:
    """Return a ``preexec_fn``: the kernel sends the new process SIGTERM when this one ends, for any reason.

    None outside the main thread: the kernel watches the thread that forked, and only the main thread runs to the end.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    parent = os.getpid()

    def bind() -> None:
        _prctl(_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before the call above took effect
            os._exit(EXIT_STOPPED)

    return bind


def adopt_orphans() -> set[int]:
    """Make this process the parent of all that its children leave behind, and return its present children."""
    _prctl(_SET_CHILD_SUBREAPER, 1)
    return _children()


def end_orphans(before: set[int], grace_s: float) -> None:
    """End all children of this process that are not in ``before``: SIGTERM, then SIGKILL after ``grace_s``."""
    orphans = _children() - before
    send(signal.SIGTERM, orphans)
    kill_after(grace_s, lambda: _reaped(_children() - before))


def kill_after(grace_s: float, alive: Callable[[], Collection[int]]) -> None:
    """Wait until ``alive()`` returns no process id; after ``grace_s`` send those SIGKILL. One that is blocked in the
    kernel then stays: nobody waits for it any longer."""
    deadline = time.monotonic() + max(grace_s, 0.0)  # none is left where another limit has passed
    while (remaining := alive()) and time.monotonic() < deadline + _KILLED_S:
        if time.monotonic() > deadline:
            send(signal.SIGKILL, remaining)
        time.sleep(_POLL_S)


def send(number: int, pids: Iterable[int]) -> None:
    """Send the signal ``number`` to those of ``pids`` that still exist."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_session(leader: int) -> None:
    """Kill what a dead session leader left behind, such as loader processes."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


@dataclass(frozen=True)
class Identity:
    """A process, so that no other one with the same number is taken for it."""

    host: str
    pid: int
    started: str
    """Clock ticks from the boot of the machine to the start of the process."""
    place: str = ""
    """Machine and container: within one place, processes see each other and share a network."""

    @classmethod
    def of_this_process(cls) -> Identity:
        return cls(socket.gethostname(), os.getpid(), _stat(os.getpid())[1], _namespace_of_processes())

    def state(self) -> str:
        """Return the letter of proc(5), such as "S" (sleeping) or "T" (stopped by a signal); "X" if the process has
        ended. Empty if it cannot be determined: on another machine or in another container, or without Linux's
        /proc."""
        if not self.started or self.place != _namespace_of_processes():
            return ""
        state, started = _stat(self.pid)
        return state if started == self.started and state != "Z" else "X"


def _namespace_of_processes() -> str:
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])
    return ""


def _stat(pid: int) -> tuple[str, str]:
    """Return the state and the start time of a process; empty if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _children() -> set[int]:
    children: set[int] = set()
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            children |= set(map(int, listed.read_text().split()))
    return children


def _reaped(children: set[int]) -> set[int]:
    """Return those that still run, and remove the others from the process table."""
    alive = set()
    for pid in children:
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                alive.add(pid)
    return alive


def _prctl(option: int, value: int) -> None:
    if _libc is not None:
        _libc.prctl(option, value, 0, 0, 0)
