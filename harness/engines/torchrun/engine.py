"""Engine torchrun: torch's elastic launcher, started on each machine by a ``harness launch`` of that machine.

torchrun starts the ranks and restarts them when some are lost or a machine joins. This engine ends it once its ranks
have ended, and reads their exits from its error files. ``Rendezvous`` says where the machines meet.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.distributed import processes
from harness.distributed.launch_env import FIXED_MACHINES
from harness.distributed.monitor import EngineReport
from harness.distributed.network import interface_towards, is_here, is_loopback, no_route, require_address
from harness.distributed.rank_exit import Cause, RankExit
from harness.distributed.worker_group import Worker, WorkerGroup
from harness.engines.base import Job, shell
from harness.engines.torchrun.settings import Settings
from harness.errors import EXIT_DONE, EXIT_STOPPED, EXIT_USAGE, EXITS_BY_SIGNAL, LaunchError, plural
from harness.runs.exit_files import ExitFiles, from_torch_error_file

KILL_S = 5.0  # from SIGTERM to SIGKILL
ORPHANS_S = 20.0  # for ranks to end whose launcher was killed; the watchdog ends them within 13 s
_CHECK_S = 1.0
_LAST_CALL_S = 5  # for more machines to join once there are enough
_HEARTBEAT_S, _HEARTBEATS = 2, 5  # after ten silent seconds a machine is lost; clocks may differ by less than that
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
        attempt, exits, _ = read_errors(self._errors)
        codes = [exit.exit_code for exit in exits]
        if not codes:
            return None
        if EXIT_STOPPED in codes:
            return None if self._where.elastic else Cause.STOPPED
        if set(codes) == {EXIT_DONE}:
            return Cause.DONE if len(codes) == self._job.settings.nproc else None
        return Cause.ERROR if attempt >= self._job.settings.max_restarts else None

    def _report(self, code: int) -> EngineReport:
        """Return the end of the run, whose launcher ended with the exit code ``code``."""
        _, exits, world_size = read_errors(self._errors)
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
        known = {exit.rank for exit in exits} | self._exit_files.read().keys()
        silent = [str(rank) for rank in range(world_size) if rank not in known]
        if not silent or (stopped and codes <= {EXIT_DONE, EXIT_STOPPED, *EXITS_BY_SIGNAL, -signal.SIGTERM}):
            return ""
        if code < 0 and self._agent.deadline == float("inf"):
            return f"its launcher on {socket.gethostname()} was killed by signal {-code}"
        others = f" (nor did rank{'s' * (len(silent) > 2)} {', '.join(silent[1:])})" if silent[1:] else ""
        return f"it left no record{others}: it was killed, or its machine was lost"


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


# Where the machines meet


@dataclass(frozen=True)
class Rendezvous:
    """Where the machines of a run meet, as one of them sees it."""

    nnodes: int = 1
    min_nodes: int = 1
    host: str = ""
    """The first machine; empty for a single machine."""
    port: int = 0
    node_rank: int | None = None
    address: str = "127.0.0.1"
    """The address of this machine, for the others."""
    hosts_store: bool | None = None
    """None: torchrun finds out."""
    wait_s: int = 600
    name: str = ""

    @property
    def elastic(self) -> bool:
        return self.min_nodes < self.nnodes

    def options(self) -> list[str]:
        """Return the options of torchrun."""
        if not self.host:
            return ["--standalone", f"--local-addr={self.address}"]
        if self.node_rank is not None:
            return [f"--nnodes={self.nnodes}", f"--node-rank={self.node_rank}", f"--master-addr={self.host}",
                    f"--master-port={self.port}", f"--rdzv-conf=timeout={self.wait_s}"]  # fmt: skip
        conf = {"join_timeout": self.wait_s, "read_timeout": self.wait_s, "last_call_timeout": _LAST_CALL_S,
                "keep_alive_interval": _HEARTBEAT_S, "keep_alive_max_attempt": _HEARTBEATS}  # fmt: skip
        if self.hosts_store is not None:
            conf["is_host"] = int(self.hosts_store)
        nnodes = f"{self.min_nodes}:{self.nnodes}" if self.elastic else str(self.nnodes)
        return [f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.host}:{self.port}",
                f"--rdzv-id={self.name}", f"--local-addr={self.address}",
                f"--rdzv-conf={','.join(f'{key}={value}' for key, value in conf.items())}"]  # fmt: skip

    def environ(self) -> dict[str, str]:
        """Return the variables for torchrun and its ranks."""
        if self.node_rank is not None:
            return {FIXED_MACHINES: "1"}
        # By default torchrun keeps the address of the first rendezvous for all later ones. After the first machine has
        # changed, or has counted its restarts differently, the ranks would wait at the wrong place.
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.host else {}

    def failed(self) -> LaunchError:
        """Return the error of a launcher that ended before it had started a rank."""
        if not self.host:
            return LaunchError("torchrun started no rank; its error is printed above")
        least = self.min_nodes if self.elastic else self.nnodes
        return LaunchError(
            f"torchrun started no rank on {self.address}: fewer than {least} machines met at {self.host}:{self.port} "
            f"within {self.wait_s} s, or the others had already exited",
            hint="run the same command on every machine; the port must be free on the first and open to the others, "
            "and launch.interface (a name such as eth0) must be able to reach them",
        )


def rendezvous_of(job: Job) -> Rendezvous:
    """Return the rendezvous that the settings of ``job`` describe, as seen from this machine. Raises LaunchError."""
    settings = job.settings
    own: Settings = settings.engine_settings
    least = own.min_nodes or settings.nnodes
    _check(job, least)
    if settings.nnodes == 1:
        return Rendezvous()
    assert own.rendezvous is not None
    host, _, port = own.rendezvous.rpartition(":")
    return Rendezvous(
        settings.nnodes, least, host, int(port), own.node_rank,
        address=_own_address(job, host),
        # torchrun compares host names, which fails if this machine's own name resolves to a loopback address.
        hosts_store=None if is_loopback(host) else is_here(host),
        wait_s=math.ceil(own.join_s),
        name=re.sub(r"[^\w.-]", "-", job.config.name),
    )  # fmt: skip


def _check(job: Job, least: int) -> None:
    """Raise LaunchError for settings that are missing or contradict each other."""
    settings = job.settings
    own: Settings = settings.engine_settings
    if least > settings.nnodes:
        raise job.error(
            f"launch.torchrun.min_nodes={least} is more than launch.nnodes={settings.nnodes}",
            "use --nnodes MIN:MAX, which sets both",
        )
    if settings.nnodes == 1:
        for key, value in (("rendezvous", own.rendezvous), ("node_rank", own.node_rank)):
            if value is not None:
                what = f"launch.torchrun.{key} needs several machines, but launch.nnodes is 1"
                raise job.error(what, "add --nnodes N, or remove it")
        return
    if own.rendezvous is None:
        raise job.error(
            f"{settings.nnodes} machines need a rendezvous address",
            "add launch.torchrun.rendezvous=HOST:PORT, with the address of the first machine",
        )
    if own.node_rank is not None:
        if own.node_rank >= settings.nnodes:
            raise job.error(
                f"launch.torchrun.node_rank={own.node_rank} is out of range",
                f"use a number from 0 to {settings.nnodes - 1}",
            )
        if settings.max_restarts:
            raise job.error(
                "launch.torchrun.node_rank and launch.max_restarts cannot be combined: a restart may change the first "
                "machine",
                "remove node_rank: machines are then numbered in the order of their addresses",
            )
    if least < settings.nnodes:
        if not settings.max_restarts:
            raise job.error("a range of machines needs launch.max_restarts: each lost machine uses one restart",
                   "add --max-restarts 3, or use --nnodes N")  # fmt: skip
        check_batch(job, least)


def check_batch(job: Job, least: int) -> None:
    """Raise LaunchError unless the global batch can be divided among every number of machines in the range."""
    batch, settings = job.config.batch, job.settings
    if batch.global_ is None or job.config.parallel.logical_ranks:  # which divide it, whatever the number of ranks
        return
    unit = settings.nproc * batch.accumulate
    for nodes in range(least, settings.nnodes + 1):
        if batch.global_ % (nodes * unit):
            common = math.lcm(*(count * unit for count in range(least, settings.nnodes + 1)))
            raise job.error(
                f"batch.global={batch.global_} cannot be divided evenly among {plural(nodes, 'machine')} with "
                f"{plural(settings.nproc, 'rank')} each",
                f"for {least} to {settings.nnodes} machines, use a multiple of {common}, or set batch.per_rank",
            )


def _own_address(job: Job, host: str) -> str:
    """Return this machine's address on the interface of the settings, else on the one that leads to ``host``."""
    name = job.settings.interface or interface_towards(host, outward=not is_loopback(host))
    if name is None:
        raise no_route(f"this machine has no route to {host}, where all machines meet", "launch.torchrun.rendezvous")
    address = require_address(name)
    if is_loopback(address) and not is_loopback(host):
        raise no_route(f"interface {name} ({address}) cannot reach other machines")
    return address


# The error files of the ranks


def read_errors(folder: Path) -> tuple[int, list[RankExit], int | None]:
    """Return the newest attempt, from 0; the exits of its local ranks so far, by time; and the world size they
    reported."""
    folders = attempts(folder)
    newest = max(folders, default=0)
    exits, world_size = [], None
    for path in folders[newest].glob("*/error.json") if folders else ():
        with suppress(OSError, ValueError, KeyError, TypeError):
            exit, world_size = from_torch_error_file(path.read_text(encoding="utf-8"))
            exits.append(exit)
    return newest, sorted(exits, key=lambda exit: exit.time), world_size


def attempts(folder: Path) -> dict[int, Path]:
    """Return the folder of each start of this machine's ranks, by number."""
    return {int(path.name.rpartition("_")[2]): path for path in folder.glob("*/attempt_*")}


def rank_processes(folder: Path) -> list[int]:
    """Return the ids of the ranks' processes and of those that they started. Linux only; elsewhere none."""
    mark = f"={folder}{os.sep}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found
