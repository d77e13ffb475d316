"""The ``launch:`` section: where the ranks of an experiment run, and how many. It never changes what is trained.

Only ``harness launch`` and the engines read it; ``driver.py`` takes its place among its peers from the environment.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from harness.section import Positive, Section

# Merging keeps what a base file has; null is how an override says "none of them".
Variables = Annotated[dict[str, str], BeforeValidator(lambda value: {} if value is None else value)]


class SlurmSection(Section):
    """For engine slurm."""

    partition: str | None = None
    """Partition to submit to; null: the cluster's default."""
    account: str | None = None
    """Account that is charged; null: the user's default."""
    time: str | None = None
    """Time limit, such as 1-12:00:00; null: the partition's."""


class DaskSection(Section):
    """For engine dask."""

    scheduler: str | None = None
    """Address of the scheduler, such as tcp://10.0.0.1:8786; null: a cluster of this machine, for this run alone."""


class FlyteSection(Section):
    """For engine flyte."""

    image: str | None = None
    """Container image with the project in it; null: this machine's own environment (local execution)."""


class KubernetesSection(Section):
    """For engine kubernetes."""

    image: str | None = None
    """Container image with the project in it."""


class LaunchSection(Section):
    engine: Literal["local", "torchrun", "slurm", "dask", "flyte", "kubernetes"] = "local"
    """What starts the ranks: local (processes of this machine), torchrun, slurm, dask, flyte or kubernetes."""
    nnodes: Positive = 1
    """Machines."""
    min_nodes: Positive | None = None
    """torchrun: go on with as few machines as this when others are lost, and with more when they join; null: nnodes."""
    nproc: Positive = 1
    """Ranks a machine: one for each GPU, or for every few CPU cores."""
    threads: Positive = 1
    """CPU threads a rank (OMP_NUM_THREADS). A number, not the machine's: a result's last bits depend on it."""
    max_restarts: Annotated[int, Field(ge=0)] = 0
    """How often a failed run is started again, from its newest checkpoint."""
    interface: str | None = None
    """Network interface between the ranks, such as eth0; null: the one that leads to rank 0's machine."""
    rendezvous: str | None = None
    """torchrun: HOST:PORT of the first machine, where all meet; null: one machine."""
    node_rank: Annotated[int, Field(ge=0)] | None = None
    """torchrun: number of this machine, from 0; null: as they come."""
    grace_s: Annotated[float, Field(gt=0)] = 60.0
    """How long ranks may take to write a checkpoint when they are asked to stop, in seconds."""
    python: str | None = None
    """The interpreter that runs driver.py; null: the one that runs the harness."""
    env: Variables = {}
    """Further environment variables of every rank, such as {NCCL_DEBUG: INFO}; null: none."""
    slurm: SlurmSection = SlurmSection()
    """What engine slurm asks for."""
    dask: DaskSection = DaskSection()
    """What engine dask asks for."""
    flyte: FlyteSection = FlyteSection()
    """What engine flyte asks for."""
    kubernetes: KubernetesSection = KubernetesSection()
    """What engine kubernetes asks for."""
