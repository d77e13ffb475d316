"""Processes of one machine that stand or fall together: started, watched, asked to stop, and none left over."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from harness.distributed.monitor import Outcome

PEERS_S = 20.0  # for the others to end by themselves once one has failed; harness.distributed.watchdog gives a blocked rank 12 to 13
KILL_S = 5.0  # from SIGTERM to SIGKILL, for those that did not
_POLL_S = 0.05


class Gang:
    """``environs[i]`` is the whole environment of process i. Each is a session of its own: the terminal's Ctrl-C comes
    through ``stop`` alone, once. ``terminal``: a file for what they print, instead of this process's terminal."""

    def __init__(
        self,
        command: Sequence[str],
        environs: Mapping[int, Mapping[str, str]],
        grace_s: float,
        cwd: str | None = None,
        terminal: Path | None = None,
    ) -> None:
        self._grace_s, self._lock = grace_s, threading.Lock()
        self._asked = 0
        self._deadline = float("inf")  # when what is left is killed
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            with open(terminal, "ab") if terminal else nullcontext() as file:
                for rank, environ in environs.items():
                    self.processes[rank] = subprocess.Popen(
                        command, env=dict(environ), cwd=cwd, start_new_session=True, stdout=file, stderr=file
                    )
        except BaseException:
            self._signal(signal.SIGKILL)
            raise

    def stop(self) -> None:
        """SIGTERM to all, and SIGKILL after the grace period; called again, SIGKILL at once."""
        with self._lock:
            self._asked += 1
            if self._asked == 1:
                self._deadline = min(self._deadline, time.monotonic() + self._grace_s)
                self._signal(signal.SIGTERM)
            else:
                self._deadline = 0.0

    def follow(self, meanwhile: Callable[[], None] = lambda: None) -> Outcome:
        """Wait until all have ended. Once one has failed the others get a moment to end by themselves. ``meanwhile``
        is called again and again."""
        exits: dict[int, int] = {}
        failed_at: float | None = None
        told = False
        while True:
            for rank, process in self.processes.items():
                if rank not in exits and (code := process.poll()) is not None:
                    exits[rank] = code
                    if code < 0:
                        _sweep(process.pid)
            if len(exits) == len(self.processes):
                return Outcome(exits, stopped=bool(self._asked))
            now = time.monotonic()
            if failed_at is None and any(exits.values()):
                failed_at = now
            if failed_at is not None and not told and now > failed_at + PEERS_S:
                told = True
                with self._lock:
                    self._deadline = min(self._deadline, now + KILL_S)
                    self._signal(signal.SIGTERM)
            if now > self._deadline:
                self._signal(signal.SIGKILL)
            meanwhile()
            time.sleep(_POLL_S)

    def _signal(self, number: int) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    process.send_signal(number)


def _sweep(session: int) -> None:
    """Kill what a rank that died of a signal left behind in its session, such as loader processes."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
