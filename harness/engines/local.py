"""Engine local: ``launch.nproc`` processes of this machine, without a launcher in between."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from harness.distributed.launch_env import gang_environment
from harness.distributed.monitor import Outcome
from harness.distributed.network import interfaces
from harness.distributed.worker_group import Gang
from harness.engines.base import Job, refuse, shell
from harness.errors import LaunchError

_NO_NODES = "one machine is all it knows; use launch.engine=torchrun, slurm, dask, flyte or kubernetes"


def render(job: Job) -> str:
    _check(job)
    first = shell(job.command(), job.environ() | _place(0, job.world_size, "PORT" if job.world_size > 1 else 0))
    if job.world_size == 1:
        return first + "\n"
    return (
        f"# {job.world_size} processes, RANK and LOCAL_RANK from 0 to {job.world_size - 1}; PORT is a free one, where "
        f"harness launch holds the store in which they meet\n{first}\n"
    )


def start(job: Job) -> Local:
    _check(job)
    return Local(job)


class Local:
    """The processes, and the store in which they meet: held here, it outlives any of them."""

    def __init__(self, job: Job) -> None:
        world, environ = job.world_size, {**os.environ, **job.environ()}
        self._store = _store() if world > 1 else None
        port = self._store.port if self._store else 0
        environs = {rank: environ | _place(rank, world, port) for rank in range(world)}
        self._gang = Gang(job.command(), environs, job.settings.grace_s)

    def follow(self) -> Outcome:
        return self._gang.follow()

    def stop(self) -> None:
        self._gang.stop()


def _check(job: Job) -> None:
    refuse(
        job, "local", nnodes=_NO_NODES, min_nodes=_NO_NODES, rendezvous=_NO_NODES, join_s=_NO_NODES,
        node_rank=_NO_NODES,
        max_restarts="the same command goes on from the newest checkpoint; launch.engine=torchrun restarts by itself",
    )  # fmt: skip
    wanted, there = job.settings.interface, interfaces()
    if wanted is not None and wanted not in there:
        raise LaunchError(
            f"there is no network interface {wanted} with an IPv4 address here", where="launch.interface",
            hint=f"interfaces of this machine: {', '.join(f'{name} ({has})' for name, has in there.items())}",
        )  # fmt: skip


def _place(rank: int, world_size: int, port: Any) -> dict[str, str]:
    return gang_environment(rank, world_size, port, "harness launch, engine local")


def _store() -> Any:
    """A store at a port that the system picks: one chosen beforehand may be taken by the time the ranks want it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
