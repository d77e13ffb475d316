"""Engine local: ``launch.nproc`` processes on this machine, without a launcher between them and ``harness launch``."""

from __future__ import annotations

import os
from typing import Any

from harness.distributed.launch_env import local_environment
from harness.distributed.network import require_address
from harness.distributed.worker_group import LocalRun
from harness.engines.base import Job, refuse, shell

_BY = "harness launch, engine local"
_ONE_MACHINE = "this engine uses one machine; use launch.engine=torchrun, slurm, dask or flyte"


def render(job: Job) -> str:
    _check(job)
    port: Any = "PORT" if job.world_size > 1 else 0
    first = shell(job.command(), job.environ() | local_environment(0, job.world_size, port, _BY))
    if job.world_size == 1:
        return first + "\n"
    return (
        f"# {job.world_size} processes, with RANK and LOCAL_RANK from 0 to {job.world_size - 1}; PORT is a free port, "
        f"on which harness launch serves the store through which they connect\n{first}\n"
    )


def start(job: Job) -> LocalRun:
    _check(job)
    for error in job.config.task.problems():
        raise error
    environ = {**os.environ, **job.environ()}
    return LocalRun(job.command(), job.world_size, environ, job.settings.grace_s, _BY)


def _check(job: Job) -> None:
    refuse(
        job, "local", nnodes=_ONE_MACHINE, min_nodes=_ONE_MACHINE, rendezvous=_ONE_MACHINE, join_s=_ONE_MACHINE,
        node_rank=_ONE_MACHINE,
        max_restarts="the same command resumes from the newest checkpoint; launch.engine=torchrun restarts the ranks",
    )  # fmt: skip
    if job.settings.interface is not None:
        require_address(job.settings.interface)
