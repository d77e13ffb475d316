"""The ``launch:`` section: where the ranks of an experiment run, and how many. It never changes what is trained.

Only ``harness launch`` and the engines read it; ``driver.py`` takes its place among its peers from the environment.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from harness.config.base import NullIsEmpty, Positive, Section

Amounts = Annotated[dict[str, Annotated[float, Field(gt=0)]], NullIsEmpty]
Variables = Annotated[dict[str, str], NullIsEmpty]
# Neither may break the line of a batch script or of a command that it is written into.
Word = Annotated[str, Field(pattern=r"^\S+$")]
Line = Annotated[str, Field(pattern=r"^[^\n]+$")]
# As Kubernetes writes amounts: 2, 500m, 0.5, 16Gi.
Quantity = Annotated[
    str,
    Field(pattern=r"^\d+(\.\d+)?(m|[kMGTPE]i?)?$"),
    BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value),
]


def _not_a_number(value: Any) -> Any:
    """YAML 1.1 reads 12:00:00 as 43200 and 30 as 30; Slurm would take both for minutes."""
    if isinstance(value, int | float):
        raise ValueError(f"YAML reads this as the number {value}; write the days too, such as 0-12:00:00")
    return value


class SlurmSection(Section):
    """For engine slurm."""

    partition: Word | None = None
    """Partition to submit to; null: the cluster's default."""
    account: Word | None = None
    """Account that is charged; null: the user's default."""
    qos: Word | None = None
    """Quality of service; null: the account's default."""
    constraint: Word | None = None
    """Features that the nodes must have, such as a100|h100; null: any."""
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$"), BeforeValidator(_not_a_number)] | None = None
    """Time limit with its days, such as 0-12:00:00; null: the partition's. (YAML takes 12:00:00 for a number.)"""
    gpus_per_node: Positive | None = None
    """GPUs of each node, all of them seen by each of its ranks; null: none is asked for."""
    cpus_per_task: Positive | None = None
    """CPU cores a rank; null: launch.threads, and one for each of data.num_workers."""
    mem: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory of each node, such as 64G; 0: all of it; null: the cluster's default."""
    requeue: bool = True
    """Let the job begin again, from its newest checkpoint, after its time limit, a preemption or the loss of a node."""
    signal_s: Positive = 120
    """How long before the time limit the ranks are told to write a checkpoint and end, in seconds."""
    output: Word = "slurm-%j.out"
    """File for what the job prints, from the working folder; %j is its number. Its folder must exist."""
    setup: tuple[Line, ...] = Field(default=(), strict=False)
    """Lines of shell to run first, on the first node, such as [module load cuda]."""
    extra: tuple[Annotated[str, Field(pattern=r"^--[a-z][^\n]*$")], ...] = Field(default=(), strict=False)
    """Further options of sbatch, such as [--exclusive]."""


class DaskSection(Section):
    """For engine dask."""

    scheduler: str | None = None
    """Address of the scheduler, such as tcp://10.0.0.1:8786; null: a cluster of this machine, for this run alone."""
    resources: Amounts = {}
    """What each rank takes of its worker's resources, such as {GPU: 1}; of workers that announce GPUs always one."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long to wait for the scheduler, and for enough workers with room, in seconds."""
    shared: bool | None = None
    """Whether the workers see this machine's run folder; null: found out. If not, its files are sent and fetched."""
    working_folder: str | None = None
    """Folder of the ranks on their machines, where relative paths of the data begin; null: this one where the disk is
    shared, else the one that a worker was started in."""


class FlyteSection(Section):
    """For engine flyte."""

    image: str | None = None
    """Container image with the project in it, for a cluster; null: Flyte's own. A run of this machine uses none."""
    cpu: Quantity | None = None
    """CPU cores of each machine, such as 4 or 500m; null: the cluster's default."""
    memory: Quantity | None = None
    """Memory of each machine, such as 16Gi; null: the cluster's default."""
    gpu: Annotated[int, Field(ge=0)] = 0
    """GPUs of each machine."""


class KubernetesSection(Section):
    """For engine kubernetes."""

    image: str | None = None
    """Container image with the project in it; needed."""
    name: Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,44}[a-z0-9])?$")] | None = None
    """Name of the job; null: the experiment's, in small letters, with - for . and _."""
    namespace: str = "default"
    """Namespace of the job."""
    cpu: Quantity | None = None
    """CPU cores of each pod, such as 4 or 500m; null: as many as it gets."""
    memory: Quantity | None = None
    """Memory of each pod, such as 16Gi; null: as much as it gets."""
    gpu: Annotated[int, Field(ge=0)] = 0
    """GPUs of each pod (nvidia.com/gpu)."""
    claims: Variables = {}
    """Volume claims and where they appear, such as {datasets: /data, runs: /runs}; all pods must be able to write where
    `output` lies. null: none, and what a run leaves is lost with its pods."""
    workdir: str | None = None
    """Working folder in the pod, where relative paths of the configuration begin; null: the image's."""


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
    rendezvous: Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:]+\]|[^\s:\[\]]+):\d{1,5}$")] | None = None
    """torchrun: HOST:PORT of the first machine, where all meet; null: one machine."""
    join_s: Annotated[float, Field(gt=0)] = 600.0
    """torchrun: how long to wait for the other machines, at the start and when one was lost, in seconds."""
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
