"""Supervision of local processes that succeed or fail together: start, watch and stop them, without leaving any
behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from harness.distributed import processes
from harness.distributed.launch_env import local_environment
from harness.distributed.monitor import EngineReport
from harness.distributed.rank_exit import Cause, RankExit

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

PEERS_S = 15.0  # for the other processes to end once one has failed; the watchdog ends a blocked rank within 13 s
KILL_S = 5.0  # from SIGTERM to SIGKILL after that
_POLL_S = 0.05
_LATE = f"killed by its launcher: it was still running {PEERS_S:.0f} s after another rank failed"


@dataclass(frozen=True)
class Worker:
    """A process to start."""

    command: Sequence[str]
    environ: Mapping[str, str] | None = None
    """Its complete environment; None: inherited from this process."""
    cwd: str | None = None
    output: Path | None = None
    """File to append its stdout and stderr to; None: the terminal of this process."""


class WorkerGroup:
    """Processes by rank, each in its own session: the terminal's Ctrl-C reaches them only through ``stop``, once.

    ``stdin`` and ``pass_fds`` are those of subprocess.Popen. ``ends_with_parent``: the kernel sends SIGTERM to the
    processes when this one dies; without it they must notice that themselves.
    """

    def __init__(
        self,
        workers: Mapping[int, Worker],
        grace_s: float,
        *,
        stdin: int | None = None,
        pass_fds: Sequence[int] = (),
        ends_with_parent: bool = False,
    ) -> None:
        self._grace_s, self._lock = grace_s, threading.Lock()
        self.deadline = float("inf")
        """Time (time.monotonic) at which remaining processes are killed; infinite until the group is stopped."""
        self._failed_at = float("inf")
        self._late: set[int] = set()  # still ran PEERS_S after the first failure
        self.num_stops = 0
        self.exits: dict[int, int] = {}
        """Exit codes, or minus the signal number, in the order in which the processes ended."""
        self.popens: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank, worker in workers.items():
                with open(worker.output, "ab") if worker.output else nullcontext() as output:
                    self.popens[rank] = subprocess.Popen(
                        worker.command, env=worker.environ, cwd=worker.cwd, stdin=stdin, stdout=output, stderr=output,
                        pass_fds=pass_fds, start_new_session=True,
                        preexec_fn=processes.terminated_with_parent() if ends_with_parent else None,
                    )  # fmt: skip
        except BaseException:
            self.abandon()
            raise

    def stop(self) -> None:
        """Send SIGTERM to all, and SIGKILL after the grace period; the second call sends SIGKILL at once."""
        self.num_stops += 1
        self.end(self._grace_s if self.num_stops == 1 else 0.0)

    def end(self, within_s: float) -> None:
        """Send SIGTERM to all, unless they got it before, and SIGKILL after ``within_s`` seconds."""
        with self._lock:
            is_first = self.deadline == float("inf")
            self.deadline = min(self.deadline, time.monotonic() + within_s)
            if is_first:
                self.send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to all."""
        self.deadline = 0.0
        self.send(signal.SIGKILL)

    def abandon(self) -> None:
        """Kill all after an error, and wait for their end: their parent may live on, and nobody would follow them."""
        self.kill()
        for process in self.popens.values():
            with suppress(subprocess.TimeoutExpired):  # of a process that is blocked in the kernel
                process.wait(KILL_S)
            processes.kill_session(process.pid)

    def send(self, number: int) -> None:
        """Send the signal ``number`` to all that have not ended."""
        for process in self.popens.values():
            process.send_signal(number)

    def poll(self) -> bool:
        """Send the signals that are due; return True once all have ended. Call it repeatedly until then."""
        for rank, process in self.popens.items():
            if rank not in self.exits and (code := process.poll()) is not None:
                self.exits[rank] = code
                if code < 0:
                    processes.kill_session(process.pid)
        now = time.monotonic()
        if any(self.exits.values()):
            self._failed_at = min(self._failed_at, now)
        if not self._late and now > self._failed_at + PEERS_S:
            self._late = self.popens.keys() - self.exits.keys()
            self.deadline = min(self.deadline, now + KILL_S)
            self.send(signal.SIGTERM)
        if now > self.deadline:
            self.send(signal.SIGKILL)
        return len(self.exits) == len(self.popens)

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> dict[int, int]:
        """Wait until all have ended, and return ``exits``. Once one has failed, the others get PEERS_S to end by
        themselves. ``meanwhile`` is called several times per second; if it raises, all are killed."""
        try:
            while not self.poll():
                meanwhile()
                time.sleep(_POLL_S)
        except BaseException:
            self.abandon()
            raise
        return self.exits

    def follow(self, meanwhile: Callable[[], None] = lambda: None) -> EngineReport:
        """Return ``wait`` as an engine reports it, for processes that are ranks."""
        exits = [
            RankExit(rank, Cause.PEER_LOST, code, message=_LATE)
            if rank in self._late and code < 0
            else RankExit.from_code(rank, code)
            for rank, code in self.wait(meanwhile).items()
        ]
        return EngineReport(exits, stopped=self.num_stops > 0)


class LocalRun(WorkerGroup):
    """The ``world_size`` ranks of ``command`` on this machine. This process holds the store through which they connect,
    so that it outlives every rank. ``environ``: of this launch; ``launched_by``: name of the launcher, for the log."""

    def __init__(
        self, command: Sequence[str], world_size: int, environ: Mapping[str, str], grace_s: float, launched_by: str
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:  # at a port that the system picks
            port = listening.getsockname()[1] if world_size > 1 else 0
            variables = [local_environment(rank, world_size, port, launched_by) for rank in range(world_size)]
            workers = {rank: Worker(command, {**environ, **variables[rank]}) for rank in range(world_size)}
            super().__init__(workers, grace_s)
            try:  # ranks that are early wait; meanwhile, this process imports torch
                self._store = _store(listening) if world_size > 1 else None
            except BaseException:
                self.abandon()
                raise


def _store(listening: socket.socket) -> TCPStore:
    """Return a store that ``listening`` leads to."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # late: only runs of several ranks need torch

    return TCPStore(
        "127.0.0.1", listening.getsockname()[1], is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60),
        master_listen_fd=listening.detach(),
    )  # fmt: skip
