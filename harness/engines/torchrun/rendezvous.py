"""Where the machines of a run meet: the options of torchrun for it, and the settings that contradict each other."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from harness.distributed.launch_env import FIXED_MACHINES
from harness.distributed.network import interface_towards, is_here, is_loopback, no_route, require_address
from harness.engines.base import Job
from harness.engines.torchrun.settings import Settings
from harness.errors import LaunchError, plural

_LAST_CALL_S = 5  # for more machines to join once there are enough
_HEARTBEAT_S, _HEARTBEATS = 2, 5  # after ten silent seconds a machine is lost; clocks may differ by less than that


class Rendezvous:
    """Where the machines of a run meet, as one of them sees it. This one is for a single machine."""

    @property
    def elastic(self) -> bool:
        """Whether machines may join and leave."""
        return False

    def options(self) -> list[str]:
        """Return the options of torchrun."""
        return ["--standalone", "--local-addr=127.0.0.1"]

    def environ(self) -> dict[str, str]:
        """Return the variables for torchrun and its ranks."""
        return {}

    def failed(self) -> LaunchError:
        """Return the error of a launcher that ended before it had started a rank."""
        return LaunchError("torchrun started no rank; its error is printed above")


@dataclass(frozen=True)
class _SeveralMachines(Rendezvous):
    """``host`` is the first machine; ``address`` is that of this one, for the others."""

    nnodes: int
    min_nodes: int
    host: str
    port: int
    address: str
    wait_s: int

    def failed(self) -> LaunchError:
        return LaunchError(
            f"torchrun started no rank on {self.address}: fewer than {self.min_nodes} machines met at "
            f"{self.host}:{self.port} within {self.wait_s} s, or the others had already exited",
            hint="run the same command on every machine; the port must be free on the first and open to the others, "
            "and launch.interface (a name such as eth0) must be able to reach them",
        )


@dataclass(frozen=True)
class _Numbered(_SeveralMachines):
    """A fixed number of machines, each with a number of the user's choice."""

    node_rank: int

    def options(self) -> list[str]:
        return [f"--nnodes={self.nnodes}", f"--node-rank={self.node_rank}", f"--master-addr={self.host}",
                f"--master-port={self.port}", f"--rdzv-conf=timeout={self.wait_s}"]  # fmt: skip

    def environ(self) -> dict[str, str]:
        return {FIXED_MACHINES: "1"}


@dataclass(frozen=True)
class _Meeting(_SeveralMachines):
    """Machines that torchrun numbers when they meet."""

    name: str

    @property
    def elastic(self) -> bool:
        return self.min_nodes < self.nnodes

    def options(self) -> list[str]:
        conf = {"join_timeout": self.wait_s, "read_timeout": self.wait_s, "last_call_timeout": _LAST_CALL_S,
                "keep_alive_interval": _HEARTBEAT_S, "keep_alive_max_attempt": _HEARTBEATS}  # fmt: skip
        # torchrun compares host names, which fails if this machine's own name resolves to a loopback address.
        if not is_loopback(self.host):
            conf["is_host"] = int(is_here(self.host))
        nnodes = f"{self.min_nodes}:{self.nnodes}" if self.elastic else str(self.nnodes)
        return [f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.host}:{self.port}",
                f"--rdzv-id={self.name}", f"--local-addr={self.address}",
                f"--rdzv-conf={','.join(f'{key}={value}' for key, value in conf.items())}"]  # fmt: skip

    def environ(self) -> dict[str, str]:
        # By default torchrun keeps the address of the first rendezvous for all later ones. After the first machine has
        # changed, or has counted its restarts differently, the ranks would wait at the wrong place.
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def rendezvous_of(job: Job) -> Rendezvous:
    """Return the rendezvous that the settings of ``job`` describe, as seen from this machine. Raises LaunchError."""
    settings = job.settings
    torchrun_settings: Settings = settings.engine_settings
    least = torchrun_settings.min_nodes or settings.nnodes
    _check(job, least)
    if settings.nnodes == 1:
        return Rendezvous()
    assert torchrun_settings.rendezvous is not None
    host, _, port = torchrun_settings.rendezvous.rpartition(":")
    arguments = settings.nnodes, least, host, int(port), _own_address(job, host), math.ceil(torchrun_settings.join_s)
    if torchrun_settings.node_rank is not None:
        return _Numbered(*arguments, torchrun_settings.node_rank)
    return _Meeting(*arguments, re.sub(r"[^\w.-]", "-", job.config.name))


def _check(job: Job, least: int) -> None:
    """Raise LaunchError for settings that are missing or contradict each other."""
    settings = job.settings
    torchrun_settings: Settings = settings.engine_settings
    if settings.nnodes == 1:
        for key, value in (("rendezvous", torchrun_settings.rendezvous), ("node_rank", torchrun_settings.node_rank)):
            if value is not None:
                message = f"launch.torchrun.{key} needs several machines, but launch.nnodes is 1"
                raise job.error(message, "add --nnodes N, or remove it")
        return
    if torchrun_settings.rendezvous is None:
        raise job.error(
            f"{settings.nnodes} machines need a rendezvous address",
            "add launch.torchrun.rendezvous=HOST:PORT, with the address of the first machine",
        )
    if torchrun_settings.node_rank is not None:
        if torchrun_settings.node_rank >= settings.nnodes:
            raise job.error(
                f"launch.torchrun.node_rank={torchrun_settings.node_rank} is out of range",
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
            raise job.error(
                "a range of machines needs launch.max_restarts: each lost machine uses one restart",
                "add --max-restarts 3, or use --nnodes N",
            )
        _check_batch(job, least)


def _check_batch(job: Job, least: int) -> None:
    """Raise LaunchError unless the global batch can be divided among every number of machines in the range."""
    if job.config.parallel.logical_ranks:  # which divide it, whatever the number of ranks
        return
    batch, counts = job.config.batch, range(least, job.settings.nnodes + 1)
    for nodes in counts:
        if misfit := batch.misfit(nodes * job.settings.nproc):
            common = math.lcm(*counts) * job.settings.nproc * batch.accumulate
            hint = f"for {least} to {counts[-1]} machines, use a multiple of {common}, or set batch.per_rank"
            raise job.error(f"{misfit[0]}, of {plural(nodes, 'machine')}", hint)


def _own_address(job: Job, host: str) -> str:
    """Return this machine's address on the interface of the settings, else on the one that leads to ``host``."""
    name = job.settings.interface or interface_towards(host, outward=not is_loopback(host))
    if name is None:
        raise no_route(f"this machine has no route to {host}, where all machines meet", "launch.torchrun.rendezvous")
    address = require_address(name)
    if is_loopback(address) and not is_loopback(host):
        raise no_route(f"interface {name} ({address}) cannot reach other machines")
    return address
