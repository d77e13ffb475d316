"""Engine torchrun: torch's elastic launcher, started on each machine by a ``harness launch`` of that machine.

torchrun starts the ranks and restarts them when some are lost or a machine joins. This engine ends it once its ranks
have ended, and reads their exits from its error files. rendezvous.py says where the machines meet.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from harness.distributed import processes
from harness.distributed.monitor import EngineReport
from harness.distributed.rank_exit import Cause, RankExit
from harness.distributed.worker_group import Worker, WorkerGroup
from harness.engines.base import Job, shell
from harness.engines.torchrun.rendezvous import Rendezvous, rendezvous_of
from harness.errors import EXIT_DONE, EXIT_STOPPED, EXIT_USAGE, EXITS_BY_SIGNAL
from harness.runs.exit_files import ExitFiles, from_torch_error_file

ON_THIS_MACHINE = True
KILL_S = 5.0  # from SIGTERM to SIGKILL
ORPHANS_S = 20.0  # for ranks to end whose launcher was killed; the watchdog ends them within 13 s
_CHECK_S = 1.0
WAIT_S = {  # how long a launcher may stay when its ranks are gone, by how they ended
    Cause.DONE: 30.0,  # it waits up to five minutes for the other machines, but all ranks end together
    Cause.STOPPED: 2.0,  # with a fixed number of machines it would wait for those that have stopped with it
    Cause.ERROR: 5.0,  # it has no restart left, and asks a machine that is out of reach
}


def render(job: Job) -> str:
    where = rendezvous_of(job)
    note = "# DIR is an empty folder on this machine, for the error files of the ranks"
    every = f"; run the same command on each of the {job.settings.nnodes} machines" if job.settings.nnodes > 1 else ""
    return f"{note}{every}\n{shell(_command(job, where, 'DIR'), _environ(job, where))}\n"


def start(job: Job) -> TorchrunRun:
    return TorchrunRun(job)


class TorchrunRun:
    """The launcher of this machine and its ranks."""

    def __init__(self, job: Job) -> None:
        self._job, self._where = job, rendezvous_of(job)
        self._checked = 0.0
        self._idle_since: float | None = None
        self._exit_files = ExitFiles(job.folder)
        self._errors = Path(tempfile.mkdtemp(prefix="harness-torchrun-"))
        command = _command(job, self._where, str(self._errors))
        try:
            self._agent = WorkerGroup(
                {0: Worker(command, {**os.environ, **_environ(job, self._where)})},
                job.settings.grace_s + KILL_S, ends_with_parent=True,
            )  # fmt: skip
        except BaseException:
            shutil.rmtree(self._errors, ignore_errors=True)
            raise

    def stop(self) -> None:
        """Send SIGTERM, which the launcher passes on; SIGKILL on the second call, or after the grace period."""
        self._agent.stop()

    def follow(self) -> EngineReport:
        try:
            code = self._agent.wait(self._end_idle_launcher)[0]
            # Ranks that outlive their launcher notice that and end by themselves.
            grace_s = min(ORPHANS_S, self._agent.deadline - time.monotonic())
            processes.kill_after(grace_s, lambda: rank_processes(self._errors))
            return self._report(code)
        finally:
            shutil.rmtree(self._errors, ignore_errors=True)

    def _end_idle_launcher(self) -> None:
        """End the launcher if it stays for too long after its last rank."""
        now = time.monotonic()
        if now < self._checked + _CHECK_S:
            return
        self._checked = now
        cause = self._ended_here()
        if cause is None or rank_processes(self._errors):
            self._idle_since = None
            return
        self._idle_since = self._idle_since or now
        if now > self._idle_since + WAIT_S[cause]:
            self._agent.end(within_s=KILL_S)

    def _ended_here(self) -> Cause | None:
        """Return the end of the run on this machine, by its ranks' exits; None while it runs, or if it may be
        restarted."""
        attempt = newest_attempt(self._errors)
        codes = [exit.exit_code for exit in attempt.exits]
        if not codes:
            return None
        if EXIT_STOPPED in codes:
            return None if self._where.elastic else Cause.STOPPED
        if set(codes) == {EXIT_DONE}:
            return Cause.DONE if len(codes) == self._job.settings.nproc else None
        return Cause.ERROR if attempt.number >= self._job.settings.max_restarts else None

    def _report(self, code: int) -> EngineReport:
        """Return the end of the run, whose launcher ended with the exit code ``code``."""
        _, exits, world_size = newest_attempt(self._errors)
        stopped = self._agent.num_stops > 0
        if not exits and code > 0 and not stopped and not attempts(self._errors):
            raise self._where.failed()
        obeyed = code >= 0 or code == -signal.SIGTERM  # the latter before it had a handler
        if stopped and not exits and obeyed and time.monotonic() < self._agent.deadline - KILL_S:
            exits = [RankExit(None, Cause.STOPPED, -signal.SIGTERM)]  # within the grace period, before a rank could
        world_size = world_size or self._job.world_size
        if lost := self._lost(code, exits, world_size, stopped):
            exits.append(RankExit.lost(lost))
        return EngineReport(exits, stopped, world_size)

    def _lost(self, code: int, exits: list[RankExit], world_size: int, stopped: bool) -> str:
        """Return the reason why some ranks left no record, if the run has failed."""
        codes = {exit.exit_code for exit in exits}
        # All ranks finish together, and a rank of this machine that was refused has printed why.
        if code == 0 or codes == {EXIT_DONE} or EXIT_USAGE in codes:
            return ""
        recorded = {exit.rank for exit in exits} | self._exit_files.read().keys()
        silent = [str(rank) for rank in range(world_size) if rank not in recorded]
        if not silent or (stopped and codes <= {EXIT_DONE, EXIT_STOPPED, *EXITS_BY_SIGNAL, -signal.SIGTERM}):
            return ""
        if code < 0 and self._agent.deadline == float("inf"):
            return f"its launcher on {socket.gethostname()} was killed by signal {-code}"
        other_ranks = f" (nor did rank{'s' * (len(silent) > 2)} {', '.join(silent[1:])})" if silent[1:] else ""
        return f"it left no record{other_ranks}: it was killed, or its machine was lost"


def _command(job: Job, where: Rendezvous, errors: str) -> list[str]:
    settings = job.settings
    python, *driver = job.command()
    return [
        python, "-m", "torch.distributed.run", *where.options(), f"--nproc-per-node={settings.nproc}",
        f"--max-restarts={settings.max_restarts}", f"--log-dir={errors}", *driver,
    ]  # fmt: skip


def _environ(job: Job, where: Rendezvous) -> dict[str, str]:
    return {
        **where.environ(),
        # By default torchrun kills ranks 30 s after a signal. (Only newer versions of torch have an option for it.)
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(job.settings.grace_s)),
        "TORCHELASTIC_ERROR_FILE": os.devnull,  # of the launcher itself, which warns if there is none
        **job.environ(),
    }


# The error files of the ranks


class Attempt(NamedTuple):
    """A start of this machine's ranks, as their error files show it."""

    number: int
    """From 0."""
    exits: list[RankExit]
    """Those so far, by time."""
    world_size: int | None
    """As the ranks have reported it."""


def newest_attempt(folder: Path) -> Attempt:
    folders = attempts(folder)
    newest = max(folders, default=0)
    exits, world_size = [], None
    for path in folders[newest].glob("*/error.json") if folders else ():
        with suppress(OSError, ValueError, KeyError, TypeError):
            exit, world_size = from_torch_error_file(path.read_text(encoding="utf-8"))
            exits.append(exit)
    return Attempt(newest, sorted(exits, key=lambda exit: exit.time), world_size)


def attempts(folder: Path) -> dict[int, Path]:
    """Return the folder of each start of this machine's ranks, by number."""
    return {int(path.name.rpartition("_")[2]): path for path in folder.glob("*/attempt_*")}


def rank_processes(folder: Path) -> list[int]:
    """Return the ids of the ranks' processes and of those that they started. Linux only; elsewhere none."""
    mark = f"={folder}{os.sep}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
    return pids
