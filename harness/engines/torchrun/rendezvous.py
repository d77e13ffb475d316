"""The rendezvous of torch's launchers on several machines: torchrun's options for it, by the settings and this
machine's network. Settings that cannot work are refused before anything waits for them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from harness.distributed.launch_env import FIXED_MACHINES
from harness.distributed.network import address_of, interface_towards, interfaces, is_here, is_loopback
from harness.engines.base import Job
from harness.errors import LaunchError, plural

_LAST_CALL_S = 5  # for more machines to join once there are enough
_HEARTBEAT_S, _HEARTBEATS = 2, 5  # after ten silent seconds a machine is lost; clocks may differ by less than that


@dataclass(frozen=True)
class Rendezvous:
    nnodes: int = 1
    min_nodes: int = 1
    host: str = ""  # of the first machine; empty for a single machine
    port: int = 0
    node_rank: int | None = None
    address: str = "127.0.0.1"  # of this machine, for the others
    hosts_store: bool | None = None  # None: torchrun finds out
    wait_s: int = 600
    name: str = ""

    @property
    def elastic(self) -> bool:
        return self.min_nodes < self.nnodes

    def options(self) -> list[str]:
        """The options of torchrun."""
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
        """The variables for torchrun and its ranks."""
        if self.node_rank is not None:
            return {FIXED_MACHINES: "1"}
        # By default torchrun keeps the address of the first rendezvous for all later ones. After the first machine has
        # changed, or has counted its restarts differently, the ranks would wait at the wrong place.
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.host else {}

    def failed(self) -> LaunchError:
        """The error of a launcher that ended before it had started a rank."""
        if not self.host:
            return LaunchError("torchrun started no rank; its error is printed above")
        least = self.min_nodes if self.elastic else self.nnodes
        return LaunchError(
            f"torchrun started no rank on {self.address}: fewer than {least} machines met at {self.host}:{self.port} "
            f"within {self.wait_s} s, or the others had already exited",
            hint="run the same command on every machine; the port must be free on the first and open to the others, "
            "and launch.interface (a name such as eth0) must be able to reach them",
        )


def of(job: Job) -> Rendezvous:
    """The rendezvous that the settings of ``job`` describe, as seen from this machine. Raises LaunchError."""
    settings = job.settings
    least = settings.min_nodes or settings.nnodes
    _check(job, least)
    if settings.nnodes == 1:
        return Rendezvous()
    assert settings.rendezvous is not None
    host, _, port = settings.rendezvous.rpartition(":")
    literal = host.strip("[]")
    return Rendezvous(
        settings.nnodes, least, host, int(port), settings.node_rank,
        address=_own_address(job, literal),
        # torchrun compares host names, which fails if this machine's own name resolves to a loopback address.
        hosts_store=None if is_loopback(literal) else is_here(literal),
        wait_s=math.ceil(settings.join_s),
        name=re.sub(r"[^\w.-]", "-", job.config.name),
    )  # fmt: skip


def _check(job: Job, least: int) -> None:
    settings = job.settings

    def refuse(message: str, hint: str) -> None:
        raise LaunchError(message, where=job.path, hint=hint)

    if least > settings.nnodes:
        refuse(
            f"launch.min_nodes={least} is more than launch.nnodes={settings.nnodes}",
            "use --nnodes MIN:MAX, which sets both",
        )
    if settings.nnodes == 1:
        for key in ("rendezvous", "node_rank"):
            if getattr(settings, key) is not None:
                refuse(f"launch.{key} needs several machines, but launch.nnodes is 1", "add --nnodes N, or remove it")
        return
    if settings.rendezvous is None:
        refuse(
            f"{settings.nnodes} machines need a rendezvous address",
            "add --rendezvous HOST:PORT, with the address of the first machine",
        )
    if settings.node_rank is not None:
        if settings.node_rank >= settings.nnodes:
            refuse(
                f"launch.node_rank={settings.node_rank} is out of range",
                f"use a number from 0 to {settings.nnodes - 1}",
            )
        if settings.max_restarts:
            refuse(
                "launch.node_rank and launch.max_restarts cannot be combined: a restart may change the first machine",
                "remove launch.node_rank: machines are then numbered in the order of their addresses",
            )
    if least < settings.nnodes:
        if not settings.max_restarts:
            refuse("a range of machines needs launch.max_restarts: each lost machine uses one restart",
                   "add --max-restarts 3, or use --nnodes N")  # fmt: skip
        check_batch(job, least)


def check_batch(job: Job, least: int) -> None:
    """Raise LaunchError unless the global batch can be divided among every number of machines in the range."""
    batch, settings = job.config.batch, job.settings
    if batch.global_ is None:
        return
    unit = settings.nproc * batch.accumulate
    for nodes in range(least, settings.nnodes + 1):
        if batch.global_ % (nodes * unit):
            common = math.lcm(*(count * unit for count in range(least, settings.nnodes + 1)))
            raise LaunchError(
                f"batch.global={batch.global_} cannot be divided evenly among {plural(nodes, 'machine')} with "
                f"{plural(settings.nproc, 'rank')} each",
                where=job.path,
                hint=f"for {least} to {settings.nnodes} machines, use a multiple of {common}, or set batch.per_rank",
            )


def _own_address(job: Job, host: str) -> str:
    """This machine's address on the interface of the settings, else on the one that leads to ``host``."""
    wanted = job.settings.interface
    name = wanted or interface_towards(host, outward=not is_loopback(host))
    address = address_of(name) if name else None
    known = ", ".join(f"{name} ({its})" for name, its in interfaces().items())
    if address is None:
        raise LaunchError(
            f"this machine has no network interface {wanted} with an IPv4 address" if wanted
            else f"this machine has no route to {host}, where all machines meet",
            where="launch.interface" if wanted else "launch.rendezvous",
            hint=f"set launch.interface to one of: {known}",
        )  # fmt: skip
    if is_loopback(address) and not is_loopback(host):
        raise LaunchError(
            f"interface {name} ({address}) cannot reach other machines", where="launch.interface",
            hint=f"set launch.interface to one of: {known}",
        )  # fmt: skip
    return address
