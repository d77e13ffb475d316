"""Collectives of the harness: reductions, gathers, and errors that all ranks raise together.

Every rank must reach every one of them. All also work for a single rank without a process group.
"""

from __future__ import annotations

import gc
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness.distributed import devices
from harness.distributed.agreement import Facts
from harness.distributed.launch_env import Launch
from harness.distributed.launch_store import background
from harness.distributed.limited_store import LimitedStore
from harness.distributed.meeting import meet, not_connected, telling_peers
from harness.distributed.network import interface_towards
from harness.distributed.processes import Identity
from harness.errors import HarnessError, LaunchError, portable, readable

Value = TypeVar("Value")

# So long after timeout_s, torch's own watchdog dumps what NCCL was doing and aborts the process. Before, that of the
# harness finds the missing rank, gives the main thread its grace, and writes the record, which takes up to 30 s.
_NCCL_S = 45.0
_LISTEN_S = 10.0  # to open a port
_CLOSE_S = 5.0  # for the threads of gloo to end
_PATIENCE_S = 5.0  # between two heartbeats while a rank works in patiently()


@dataclass
class Runtime:
    """One rank: its launch environment, its device, and the collectives of the harness."""

    launch: Launch = field(default_factory=Launch)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: LimitedStore | None = None  # torch's key-value store, where there is a process group
    timeout_s: float = math.inf  # limit of a wait for a peer
    peers: Sequence[Identity] = ()  # the processes of all ranks, by rank, where there is a process group
    failed: bool = False  # set when this rank reports a failure, its own or a consequence of another's
    _control: Any = None  # a gloo group for Python objects and flags, separate from that of the gradients

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def world_size(self) -> int:
        return self.launch.world_size

    @property
    def group(self) -> Any:
        """The gloo group of ``gather`` and the like; None without a process group."""
        return self._control

    def new_group(self) -> Any:
        """A gloo group of all ranks for the collectives of another thread. Collective."""
        if self.world_size == 1:
            return None
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))

    @property
    def host(self) -> str:
        return socket.gethostname()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of ``tensor`` (same shape and dtype on all), in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """``sum`` for a tensor on the CPU, which nccl cannot reduce."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self._control)
        return tensor

    def union_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bits of ``tensor`` (integers on the CPU, same shape on all) that are set on any rank, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.BOR, group=self._control)
        return tensor

    def gather(self, value: Value) -> list[Value]:
        """Every rank's ``value`` (picklable), by rank, on all ranks."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self._control)
        return values

    def gather_to_first(self, value: Value) -> list[Value]:
        """Every rank's ``value`` (picklable), by rank, on rank 0; an empty list elsewhere."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, group=self._control)
        return values or []

    def from_first(self, value: Value) -> Value:
        """Rank 0's ``value`` (picklable) on all ranks."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0, group=self._control)
        return values[0]

    def barrier(self) -> None:
        self.gather(None)

    def max_async(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start the maximum over ranks of each of ``values``; calling the result waits for it and returns it."""
        if self.world_size == 1:
            return lambda: list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control, async_op=True)

        def answer() -> list[int]:
            work.wait()
            return tensor.tolist()

        return answer

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """A stage that all ranks enter: if any rank raises in it, all ranks raise, so that none waits for another.

        The body must not contain a collective. All ranks raise the error of the lowest failing rank, with that rank in
        ``origin_rank``.
        """
        mine: Exception | None = None
        try:
            yield
        except Exception as error:
            mine = error
        if self.world_size > 1:
            errors = self.gather(None if mine is None else _portable(mine))
            first = next((rank for rank, error in enumerate(errors) if error is not None), None)
            if first is not None and first != self.rank:
                theirs = errors[first]
                assert theirs is not None
                theirs.origin_rank = first
                raise theirs
        if mine is not None:
            raise mine

    def patiently(self, doing: str, work: Callable[[], Value]) -> Value:
        """Return ``work()``, which may take longer on some ranks than the timeout of a collective: meanwhile the ranks
        exchange heartbeats. If any rank raises, all ranks raise. Collective."""
        if self.world_size == 1:
            return work()
        future = background(work, "harness-patience")  # if a peer dies meanwhile, this process need not wait for it
        pause_s = 0.05
        while not all(self.gather(not wait([future], pause_s).not_done)):
            pause_s = min(2 * pause_s, _PATIENCE_S)
        with self.together(doing):
            return future.result()

    def all_equal(self, value: Value, what: str, hint: str = "") -> Value:
        """Return ``value`` if every rank holds the same; else raise LaunchError with a rank that differs.
        Collective."""
        for rank, other in enumerate(self.gather(value)):
            if other != value:
                raise LaunchError(
                    f"{what} differs between ranks: {value!r} on rank {self.rank}, {other!r} on rank {rank}", hint=hint
                )
        return value


def _portable(error: Exception) -> HarnessError:
    """``error`` as a HarnessError that can be pickled."""
    known = portable(error) if isinstance(error, HarnessError) else None
    return known if isinstance(known, HarnessError) else HarnessError(f"{type(error).__name__}: {readable(error)}")


@contextmanager
def open_runtime(
    launch: Launch,
    device: str = "auto",
    timeout_s: float = 120.0,
    facts: Callable[[torch.device], Sequence[Facts]] = lambda target: (),
) -> Iterator[Runtime]:
    """A Runtime for ``launch``, with a process group if there are several ranks; closed at the end of the body.

    One group uses gloo for CPU tensors and nccl for CUDA tensors. ``timeout_s`` bounds every wait for a peer.
    ``facts(device)``: the values that must be equal on all ranks. Raises LaunchError if they are not, or share a
    device; PeersMissing if they do not connect.
    """
    with telling_peers(launch):
        target = devices.choose(device, launch.local_rank, launch.local_world_size, may_be_isolated=launch.by == "srun")
        if target.type == "cuda":
            torch.cuda.set_device(target)
        if launch.world_size > 1 or launch.by_hand:
            agreed = [Facts(devices.ALL_ALIKE, {"device": target.type}), *facts(target)]
    if launch.world_size == 1:
        yield Runtime(launch, target, _listen(launch, agreed) if launch.by_hand else None, timeout_s)
        return
    store = meet(launch, agreed, timeout_s)
    runtime = _connect(launch, target, store, timeout_s)
    try:
        devices.check_own(runtime.gather((runtime.host, devices.card(target))))
        runtime.peers = runtime.gather(Identity.of_this_process())
        yield runtime
    finally:
        # After a failure nccl would wait for peers that may be gone. gloo aborts if left open.
        no_failure = sys.exc_info()[0] is None and not runtime.failed
        if target.type == "cpu" or no_failure:
            # A sharded model keeps the group alive in reference cycles, and gloo aborts if its threads outlive it.
            gc.collect()
        if target.type == "cpu":
            # A thread of gloo may wait for a peer that is frozen.
            wait([background(dist.destroy_process_group, "harness-close")], _CLOSE_S)
        elif no_failure:
            dist.destroy_process_group()


def _listen(launch: Launch, agreed: Sequence[Facts]) -> LimitedStore | None:
    """The store through which other ranks would connect to this single one, which WORLD_SIZE=1 may have made single by
    mistake: the watchdog notices them there. None if the port is in use."""
    with suppress(HarnessError):
        return LimitedStore(meet(replace(launch, master_addr="127.0.0.1"), agreed, _LISTEN_S))
    return None


def _connect(launch: Launch, target: torch.device, store: Any, timeout_s: float) -> Runtime:
    """Open the process group of the ranks, through ``store``."""
    _choose_interface(launch)
    if target.type == "cuda":
        os.environ.setdefault("NCCL_DEBUG", "WARN")  # else NCCL keeps the cause of an error to itself
    timeout = timedelta(seconds=timeout_s)
    try:
        backend = "gloo" if target.type == "cpu" else "cpu:gloo,cuda:nccl"
        limit = timeout if target.type == "cpu" else timedelta(seconds=timeout_s + _NCCL_S)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=limit)
        control = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or "of the default route"
        names = "GLOO_SOCKET_IFNAME" if target.type == "cpu" else "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        hint = f"check that the interface {interface} reaches the other machines ({names}; launch.interface)"
        raise not_connected(launch, store, error, hint) from None
    return Runtime(launch, target, LimitedStore(store), timeout_s, _control=control)


def _choose_interface(launch: Launch) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that leads to the master.

    By default gloo binds the address that the host name resolves to. That is often a loopback address, which ranks on
    other nodes cannot reach.
    """
    several_nodes = launch.world_size > launch.local_world_size
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_towards(launch.master_addr, several_nodes)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
