"""Settings of engine slurm."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from harness.config.base import Matching, Positive, Section

# These are written into a batch script, where a blank or a line break would change its meaning.
Word = Annotated[str, Matching(r"\S+", "it must not contain spaces")]
Line = Annotated[str, Matching(r"[^\n]+", "it must not contain line breaks")]


def _not_a_number(value: Any) -> Any:
    """Refuse numbers: YAML 1.1 reads 12:00:00 as 43200, and Slurm takes a plain number for minutes."""
    if isinstance(value, int | float):
        raise ValueError(f"YAML reads this as the number {value}; include the days, such as 0-12:00:00")
    return value


class Settings(Section):
    """The section ``launch.slurm``."""

    min_nodes: Positive | None = None
    """Start with this many nodes or more, such as 1, if Slurm has no launch.nnodes for a requeued job; null:
    launch.nnodes.
    """
    partition: Word | None = None
    """Partition to submit to, such as gpu; null: the cluster's default."""
    account: Word | None = None
    """Account to charge, such as my_lab; null: the user's default."""
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
    """GPUs per node, such as 4, all of them visible to each of its ranks; null: none requested."""
    cpus_per_task: Positive | None = None
    """CPU cores per rank, such as 8; null: launch.threads, plus one for each of data.num_workers."""
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
    """Other options of sbatch, such as [--qos=high, --exclusive]."""
