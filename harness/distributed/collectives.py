"""The collectives of torch, as the harness calls them. All also work for a single rank without a process group."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world

from harness.distributed.agreement import Facts, disagreement
from harness.distributed.launch_env import Launch
from harness.distributed.processes import Identity

Value = TypeVar("Value")

# So long after timeout_s, torch's own watchdog dumps what NCCL was doing and aborts the process. Before, that of the
# harness finds the missing rank, gives the main thread its grace, and writes the record, which takes up to 30 s.
NCCL_S = 45.0
_LONGEST_S = 1e8  # three years: timedelta and torch's milliseconds have no infinity
_OF_THREADS = "harness threads"  # describes the groups of new_group()


@dataclass
class Collectives:
    """What the ranks exchange at once. Every rank must reach every one of these methods."""

    launch: Launch = field(default_factory=Launch)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: dist.ProcessGroup | None = field(default=None, kw_only=True)
    """A gloo group for Python objects and flags, separate from that of the gradients; None without a process group."""
    peers: Sequence[Identity] = field(default=(), kw_only=True)
    """The processes of all ranks, by rank, where there is a process group."""

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def world_size(self) -> int:
        return self.launch.world_size

    @property
    def host(self) -> str:
        return socket.gethostname()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of ``tensor`` (same shape and dtype on all), in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``sum`` for a tensor on the CPU, which nccl cannot reduce."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def union_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bits of ``tensor`` (integers on the CPU, same shape on all) that are set on any rank, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.BOR, group=self.group)
        return tensor

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's ``value`` (picklable), by rank, on all ranks."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_to_first(self, value: Value) -> list[Value]:
        """Return every rank's ``value`` (picklable), by rank, on rank 0; an empty list elsewhere."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group)
        return values or []

    def from_first(self, value: Value) -> Value:
        """Return rank 0's ``value`` (picklable) on all ranks."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def barrier(self) -> None:
        self.gather(None)

    def max_async(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start the maximum over ranks of each of ``values``; calling the result waits for it and returns it."""
        if self.world_size == 1:
            return lambda: list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

        def answer() -> list[int]:
            work.wait()
            return tensor.tolist()

        return answer

    def all_equal(self, value: Any, name: str, hint: str) -> None:
        """Raise LaunchError unless every rank holds the same ``value`` for ``name``. Collective."""
        self.all_agree([Facts(hint, {name: value})])

    def all_agree(self, facts: Sequence[Facts]) -> None:
        """Raise LaunchError, which lists what differs, unless all ranks have the same ``facts``. Collective."""
        gathered = self.gather(facts)
        if gathered.count(facts) < len(gathered):  # quick, also for a thousand ranks
            hosts = {rank: process.host for rank, process in enumerate(self.peers)}
            if error := disagreement(dict(enumerate(gathered)), hosts):
                raise error


def new_group(limit_s: float) -> dist.ProcessGroup:
    """Return a gloo group of all ranks, whose collectives another thread than the main one starts. Collective."""
    group = dist.new_group(backend="gloo", timeout=_timedelta(limit_s), group_desc=_OF_THREADS)
    return cast(dist.ProcessGroup, group)  # every rank is a member


def main_groups() -> list[dist.ProcessGroup]:
    """Return the process groups whose collectives the main thread starts."""
    return [group for group in list(_world.pg_names) if group.group_desc != _OF_THREADS]


def limit_main_groups(limit_s: float) -> None:
    """Bound the collectives of ``main_groups`` that start from now on."""
    for group in main_groups():
        limit = _timedelta(limit_s + NCCL_S * ("nccl" in str(dist.get_backend_config(group))))
        if hasattr(dist, "set_timeout"):
            dist.set_timeout(limit, group)
        else:  # in older versions of torch
            distributed_c10d._set_pg_timeout(limit, group)


def _timedelta(seconds: float) -> timedelta:
    return timedelta(seconds=min(seconds, _LONGEST_S))
