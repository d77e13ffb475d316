"""The ``launch:`` section: where the ranks of an experiment run, and how many. It never changes what is trained.

Only ``harness launch`` and the engines read it. ``driver.py`` takes its rank and world size from the environment.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from harness.config.base import Arguments, Matching, NameOf, NullIsEmpty, Positive, Seconds, Section

Amounts = Annotated[dict[str, Annotated[float, Field(gt=0)]], NullIsEmpty]
Variables = Annotated[dict[str, str], NullIsEmpty]
# These are written into a batch script or a command, where a blank or a line break would change its meaning.
Word = Annotated[str, Matching(r"\S+", "it must not contain spaces")]
Line = Annotated[str, Matching(r"[^\n]+", "it must not contain line breaks")]
# A quantity in Kubernetes notation: 2, 500m, 0.5, 16Gi.
Quantity = Annotated[
    str,
    Matching(r"\d+(\.\d+)?(m|[kMGTPE]i?)?", "write a Kubernetes quantity, such as 2, 500m or 16Gi"),
    BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value),
]


def _not_a_number(value: Any) -> Any:
    """Refuse numbers: YAML 1.1 reads 12:00:00 as 43200, and Slurm takes a plain number for minutes."""
    if isinstance(value, int | float):
        raise ValueError(f"YAML reads this as the number {value}; include the days, such as 0-12:00:00")
    return value


class SlurmSection(Section):
    """Settings for the slurm engine."""

    partition: Word | None = None
    """Partition to submit to; null: the cluster's default."""
    account: Word | None = None
    """Account to charge; null: the user's default."""
    qos: Word | None = None
    """Quality of service; null: the account's default."""
    constraint: Word | None = None
    """Required node features, such as a100|h100; null: any node."""
    time: (
        Annotated[
            str,
            Matching(r"(\d+-)?\d+(:\d+){0,2}", "write days and hours, such as 0-12:00:00"),
            BeforeValidator(_not_a_number),
        ]
        | None
    ) = None
    """Time limit with days, such as 0-12:00:00, since YAML reads 12:00:00 as a number; null: the partition's limit."""
    gpus_per_node: Positive | None = None
    """GPUs per node, all of them visible to each of its ranks; null: none requested."""
    cpus_per_task: Positive | None = None
    """CPU cores per rank; null: launch.threads, plus one for each of data.num_workers."""
    mem: Annotated[str, Matching(r"\d+[KMGT]?", "write a size, such as 64G")] | None = None
    """Memory per node, such as 64G; 0: all of it; null: the cluster's default."""
    requeue: bool = True
    """Requeue the job after its time limit, a preemption or a node failure; it resumes from its newest checkpoint."""
    signal_s: Positive = 120
    """Seconds before the time limit at which the ranks are asked to write a checkpoint and exit."""
    output: Word = "slurm-%j.out"
    """File for the job's output, relative to the working folder; %j is the job number. Its folder must exist."""
    setup: tuple[Line, ...] = Field(default=(), strict=False)
    """Shell commands to run first, on the first node, such as [module load cuda]."""
    extra: tuple[Annotated[str, Matching(r"--[a-z][^\n]*", "write options of sbatch, such as --exclusive")], ...] = (
        Field(default=(), strict=False)
    )
    """Other options of sbatch, such as [--exclusive]."""


class DaskSection(Section):
    """Settings for the dask engine."""

    scheduler: str | None = None
    """Scheduler address, such as tcp://10.0.0.1:8786; null: a cluster on this machine, for this run only."""
    resources: Amounts = {}
    """Worker resources per rank, such as {GPU: 1}. On workers that announce GPUs, a rank always takes one."""
    timeout_s: Seconds = 60.0
    """Seconds to wait for the scheduler, and for enough free workers."""
    shared: bool | None = None
    """true: the workers share this machine's run folder; false: its files are copied; null: detected."""
    working_folder: str | None = None
    """Working folder of the ranks, in which relative data paths are resolved; null: the current one if the disk is
    shared, else the folder in which the worker was started.
    """


class FlyteSection(Section):
    """Settings for the flyte engine."""

    image: str | None = None
    """Container image with the project in it; null: Flyte's own. Runs on this machine use none."""
    cpu: Quantity | None = None
    """CPU cores per machine, such as 4 or 500m; null: the cluster's default."""
    memory: Quantity | None = None
    """Memory per machine, such as 16Gi; null: the cluster's default."""
    gpu: Annotated[int, Field(ge=0)] = 0
    """GPUs per machine."""


class LaunchSection(Section):
    engine: Annotated[str, NameOf("engine")] = "local"
    """Launcher of the ranks: local (processes on this machine), torchrun, slurm, dask, flyte, or your own
    package.module.
    """
    nnodes: Positive = 1
    """Number of machines."""
    min_nodes: Positive | None = None
    """For torchrun: continue with this many machines when others are lost, and with more when they join; null: nnodes.
    """
    nproc: Positive = 1
    """Ranks per machine: typically one per GPU, or one per few CPU cores."""
    threads: Positive = 1
    """CPU threads per rank (OMP_NUM_THREADS), the same on any machine, since the last bits of a result depend on it.
    """
    max_restarts: Annotated[int, Field(ge=0)] = 0
    """Maximum number of restarts of a failed run, each from its newest checkpoint."""
    interface: str | None = None
    """Network interface for communication between ranks, such as eth0; null: the one that reaches rank 0's machine."""
    rendezvous: (
        Annotated[str, Matching(r"(\[[0-9a-fA-F:]+\]|[^\s:\[\]]+):\d{1,5}", "write HOST:PORT, such as node1:29400")]
        | None
    ) = None
    """For torchrun: HOST:PORT of the first machine, where all machines meet; null: one machine."""
    join_s: Seconds = 600.0
    """For torchrun: seconds to wait for the other machines, at the start and after one is lost."""
    node_rank: Annotated[int, Field(ge=0)] | None = None
    """For torchrun: number of this machine, from 0; null: in the order of the machines' addresses."""
    grace_s: Seconds = 60.0
    """Seconds that ranks may take to write a checkpoint when they are asked to stop."""
    python: str | None = None
    """Interpreter that runs driver.py; null: the current one."""
    env: Variables = {}
    """Environment variables to set for every rank, such as {NCCL_DEBUG: INFO}; null: none."""
    slurm: SlurmSection = SlurmSection()
    """Settings for the slurm engine."""
    dask: DaskSection = DaskSection()
    """Settings for the dask engine."""
    flyte: FlyteSection = FlyteSection()
    """Settings for the flyte engine."""
    options: Arguments = {}
    """Settings of a custom engine, checked against its Options class."""
