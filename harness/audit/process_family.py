"""All processes of one start of an audited command, also those in sessions of their own, and their common end."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

KILL_S = 30.0
_POLL_S = 0.02


class FamilyMember(NamedTuple):
    """A process, with the time of its start: another process may get its number later."""

    pid: int
    started: str


class ProcessFamily:
    """The launcher, its descendants, and every process whose environment names the ``plan`` of this start.

    A process without that environment whose parent has ended is a member only if an earlier call of ``alive`` has seen
    it as a descendant. This process itself is never one.
    """

    def __init__(self, launcher: int, plan: str) -> None:
        self._plan = os.fsencode(f"={plan}\0")
        self._known = {FamilyMember(launcher, process.started)} if (process := _process(launcher)) else set()

    def alive(self) -> set[FamilyMember]:
        """Look for members, and return those that have not ended. A member is remembered when its parent ends."""
        table = _table()
        table.pop(os.getpid(), None)
        children = defaultdict(list)
        for pid, process in table.items():
            children[process.parent].append(pid)
        left = [pid for pid, process in table.items() if FamilyMember(pid, process.started) in self._known]
        left += [pid for pid in table if self._plan in _environment(pid)]
        found: set[int] = set()
        while left:
            pid = left.pop()
            if pid not in found and pid in table:
                found.add(pid)
                left += children[pid]
        self._known = {FamilyMember(pid, table[pid].started) for pid in found}
        return {member for member in self._known if table[member.pid].state != "Z"}

    def send(self, number: int) -> None:
        for member in self.alive():
            _send(number, member)

    def kill(self, within_s: float = KILL_S) -> set[FamilyMember]:
        """End all members as a power cut would: all are stopped before the first is killed, so that none can react to
        the end of another. Returns those that still exist after ``within_s`` seconds."""
        deadline, stopped = time.monotonic() + within_s, set[FamilyMember]()
        while (new := self.alive() - stopped) and time.monotonic() < deadline:
            for member in new:
                _send(signal.SIGSTOP, member)
            stopped |= new
        while (left := self.alive()) and time.monotonic() < deadline:
            for member in left:
                _send(signal.SIGKILL, member)
            time.sleep(_POLL_S)
        return left


class _Process(NamedTuple):
    parent: int
    state: str
    started: str


def _table() -> dict[int, _Process]:
    """Return {pid: process} of this machine, as far as this user sees it."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid: process for pid in pids if (process := _process(pid))}


def _process(pid: int) -> _Process | None:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return _Process(int(fields[1]), fields[0], fields[19])
    return None


def _environment(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _send(number: int, member: FamilyMember) -> None:
    """Send a signal, unless the process has ended in the meantime and its number belongs to another."""
    process = _process(member.pid)
    if process is not None and process.started == member.started:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(member.pid, number)
