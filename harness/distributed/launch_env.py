"""The launch environment: rank, world size and rendezvous address of a process.

The only reader of RANK, WORLD_SIZE, SLURM_* and the like, and their writer for ranks that an engine starts. Does not
import torch, so that launchers start fast.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from harness.errors import LaunchError

_BY = "HARNESS_LAUNCHED_BY"
_STORE_IS_HELD = "TORCHELASTIC_USE_AGENT_STORE"
FIXED_MACHINES = "HARNESS_FIXED_MACHINES"  # set by a launcher of torch that no further machine can join
_TORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HINT = "start it with torchrun --nproc-per-node=N -m harness.train -c CONFIG, or unset the variables"


@dataclass(frozen=True)
class Launch:
    """The place of this process among the ranks, as set by its launcher."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    by: str = "none (one process)"
    elastic: bool = False
    """Torch's launcher has started it, which ends all ranks of a node once one has ended."""
    supervised: bool = False
    """Started by a launcher that this process must not outlive."""
    parent: int = field(default=0, compare=False)
    """The process that started this one, as seen at its start; 0: not known."""
    restart: int = 0
    call: int = field(default=0, compare=False)
    """The number of this call of the Python API, which may start several runs in a process."""
    may_grow: bool = False
    """Torch's launcher may restart the ranks because another machine joins."""
    store_is_held: bool = False
    """The launcher holds the store at the master's port, so rank 0 must not open one."""
    error_file: str = ""
    """Where torch's launcher looks for the error of this rank."""

    @property
    def alone(self) -> bool:
        """Whether no launcher has started this process."""
        return self == Launch()

    @property
    def orphaned(self) -> bool:
        """Whether the launcher is gone. A shell may end before its job does (nohup): only a launcher's death leaves a
        rank without supervision."""
        return self.supervised and self.parent not in (0, os.getppid())


def detect(environ: Mapping[str, str], local_rank: int | None = None, parent: int | None = None) -> Launch:
    """Return the launch that ``environ`` describes: a complete set of torch's variables, else Slurm's, else one
    process.

    ``local_rank`` is the command line's ``--local_rank`` or ``--local-rank``, which must agree. ``parent``: the process
    that started this one, if it was noted earlier, since it may have died meanwhile.
    Raises LaunchError for an incomplete set, a number out of range or a contradiction.
    """
    in_slurm = "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ
    present = [name for name in _TORCH if name in environ and not (in_slurm and name.startswith("MASTER"))]
    if present:
        if local_rank is not None and "LOCAL_RANK" not in environ:
            environ = {**environ, "LOCAL_RANK": str(local_rank)}
        launch = _from_torch(environ)
    elif in_slurm:
        launch = _from_slurm(environ)
    else:
        launch = Launch()
    if local_rank is not None and local_rank != launch.local_rank:
        raise LaunchError(
            f"--local_rank={local_rank} contradicts local rank {launch.local_rank} of the environment; "
            f"launcher: {launch.by}",
            hint="remove --local_rank, or start the script with a launcher that sets both",
        )
    return replace(launch, parent=parent or os.getppid())


def may_be_first(environ: Mapping[str, str]) -> bool:
    """Return False if, by its environment, this process is not its machine's first rank."""
    return all(environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "SLURM_LOCALID"))


def environment(launch: Launch) -> dict[str, str]:
    """Return the variables from which ``detect`` reads ``launch``; ``by`` is among them for a supervised rank."""
    return {
        "RANK": str(launch.rank),
        "LOCAL_RANK": str(launch.local_rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": str(launch.master_port),
        _STORE_IS_HELD: str(launch.store_is_held),
        "TORCHELASTIC_RESTART_COUNT": str(launch.restart),
        **({_BY: launch.by} if launch.supervised else {}),
    }


def local_environment(rank: int, world_size: int, port: int, by: str) -> dict[str, str]:
    """Return the variables of a rank on this machine whose parent holds the store at ``port``."""
    launch = Launch(rank, rank, world_size, world_size, "127.0.0.1", port, by, supervised=True, store_is_held=True)
    return environment(launch)


def _from_torch(environ: Mapping[str, str]) -> Launch:
    """Return the launch of torch's variables. Raises LaunchError if one of them is missing."""
    missing = [name for name in _TORCH if not environ.get(name)]
    if missing:
        present = ", ".join(f"{name}={environ[name]}" for name in _TORCH if name in environ)
        raise LaunchError(
            f"the launch environment is incomplete: found {present}; missing {', '.join(missing)}", hint=_HINT
        )
    elastic = "TORCHELASTIC_RUN_ID" in environ
    world_size = _number(environ, "WORLD_SIZE", 1)
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", 1, world_size, default=world_size)
    return Launch(
        rank=_number(environ, "RANK", 0, world_size - 1),
        local_rank=_number(environ, "LOCAL_RANK", 0, local_world_size - 1),
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT", 0, 65535),
        by=environ.get(_BY) or ("torch.distributed.launch or torchrun" if elastic else "RANK and WORLD_SIZE"),
        elastic=elastic,
        supervised=elastic or _BY in environ,
        restart=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0, default=0),
        may_grow=elastic and FIXED_MACHINES not in environ,
        store_is_held=environ.get(_STORE_IS_HELD) == "True",
        error_file=environ.get("TORCHELASTIC_ERROR_FILE", ""),
    )


def _from_slurm(environ: Mapping[str, str]) -> Launch:
    """Return the launch of one task of an srun step. Its port follows from the job id, so that all ranks agree without
    communication, and is below 32768, where Linux begins to give ports to outgoing connections."""
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS", 1)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or ""
    if not nodes and "MASTER_ADDR" not in environ:
        raise LaunchError("Slurm's environment has no node list (SLURM_STEP_NODELIST)", hint="export MASTER_ADDR")
    job, step = (_number(environ, name, 0, default=0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    # With the step: steps of one job may run at the same time on one node.
    port = _number(environ, "MASTER_PORT", 0, 65535, default=20000 + (job + 97 * step) % 12768)
    per_node = _expanded(environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1")))
    node = _number(environ, "SLURM_NODEID", 0, default=0)
    return Launch(
        rank=_number(environ, "SLURM_PROCID", 0, world_size - 1),
        local_rank=_number(environ, "SLURM_LOCALID", 0, world_size - 1),
        world_size=world_size,
        local_world_size=per_node[min(node, len(per_node) - 1)],
        master_addr=environ.get("MASTER_ADDR") or first_host(nodes),
        master_port=port,
        by="srun",
    )


def _expanded(counts: str) -> list[int]:
    """Return Slurm's number of tasks of each node: "4(x2),3" is 4, 4, 3."""
    matches = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(number) for number, times in matches for _ in range(int(times or 1))] or [1]


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: "node[03-07,9],x" is node03, "rack[1-2]n[3-4]" is rack1n3."""
    match = re.match(r"(?:[^,\[\]]|\[\w[^\]]*\])+", nodelist)
    if not match:
        raise LaunchError(f"the node list {nodelist!r} cannot be read", hint="export MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match.group())


def _number(
    environ: Mapping[str, str], name: str, low: int, high: int | None = None, default: int | None = None
) -> int:
    """Return the variable ``name`` as a number from ``low`` to ``high``; ``default`` if there is none. Raises
    LaunchError."""
    try:
        value = int(environ[name])
    except KeyError:
        if default is not None:
            return default
        raise LaunchError(f"the launch environment is incomplete: {name} is missing", hint=_HINT) from None
    except ValueError:
        raise LaunchError(f"{name}={environ[name]!r} is not a whole number", hint=_HINT) from None
    if value < low or (high is not None and value > high):
        allowed = f"from {low} to {high}" if high is not None else f"{low} or more"
        raise LaunchError(f"{name}={value} is out of range: {allowed}", hint=_HINT)
    return value
