"""What the ranks do together: reductions, gathers, verdicts.

Every collective here also works without a process group, where a rank is alone; every one must be reached by all ranks.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from harness.distributed import devices
from harness.distributed.launch_env import Launch
from harness.distributed.network import interface_towards
from harness.errors import HarnessError, LaunchError

Value = TypeVar("Value")

_PATIENCE_S = 5.0  # between two signs of life while something takes long


@dataclass
class Runtime:
    """One rank among its peers: who it is, its device, and the collectives of the harness."""

    launch: Launch = field(default_factory=Launch)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: Any = None  # torch's key-value store, where there is a process group
    failed: bool = False  # this rank, or a peer; set by whoever reports it
    _control: Any = None  # a gloo group for Python objects and flags, beside whatever gradients use

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
        """The sum over ranks of ``tensor`` (same shape and dtype on all), in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def union(self, bits: torch.Tensor) -> torch.Tensor:
        """Bitwise or over ranks of a uint8 tensor on the CPU, in place."""
        if self.world_size > 1:
            dist.all_reduce(bits, op=dist.ReduceOp.BOR, group=self._control)
        return bits

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
        """Start taking the maximum over ranks of each of ``values``; it comes by calling what is returned, later."""
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
        """A stage that all ranks enter: an error of any rank becomes the error of every rank, and nobody waits.

        The body must hold no collective. The lowest rank's error is everybody's; ``told_by`` says whose it was.
        """
        mine: Exception | None = None
        try:
            yield
        except Exception as error:
            mine = error
        if self.world_size > 1:
            told = self.gather(None if mine is None else _portable(mine))
            first = next((rank for rank, error in enumerate(told) if error is not None), None)
            if first is not None and first != self.rank:
                theirs = told[first]
                assert theirs is not None
                theirs.told_by = first
                raise theirs
        if mine is not None:
            raise mine

    def patiently(self, doing: str, work: Callable[[], Value]) -> Value:
        """This rank's ``work()``, which may take longer on some rank than a wait for a peer may: the ranks tell one
        another every few seconds that they live. An error of any rank becomes that of every rank. Collective."""
        if self.world_size == 1:
            return work()
        future: Future[Value] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        # A daemon: if a peer dies meanwhile, nobody waits for it.
        Thread(target=run, name="harness-patience", daemon=True).start()
        pause_s = 0.05
        while not all(self.gather(not wait([future], pause_s).not_done)):
            pause_s = min(2 * pause_s, _PATIENCE_S)
        with self.together(doing):
            return future.result()

    def all_equal(self, value: Value, what: str, hint: str = "") -> Value:
        """``value``, after making sure that every rank holds the same; raises LaunchError naming the odd one out."""
        for rank, other in enumerate(self.gather(value)):
            if other != value:
                raise LaunchError(
                    f"{what} differs between ranks: {value!r} on rank {self.rank}, {other!r} on rank {rank}", hint=hint
                )
        return value


def _portable(error: Exception) -> HarnessError:
    """``error`` as something that crosses a process border."""
    if isinstance(error, HarnessError):
        return error
    return HarnessError(f"{type(error).__name__}: {error}")


def _meet(launch: Launch, timeout_s: float) -> Any:
    """The store of this launch: the one that torch's launcher opened, else one that rank 0 opens for all."""
    timeout = timedelta(seconds=timeout_s)
    url = f"tcp://{launch.master_addr}:{launch.master_port}"
    store, _, _ = next(rendezvous(url, launch.rank, launch.world_size, timeout=timeout))
    store.set_timeout(timeout)
    # A restarted gang must not read the keys of the one before it in a store that the launcher kept. One that rank 0
    # opens is new each time; and there launchers of several nodes may meet who count their restarts differently.
    return PrefixStore(f"harness/{launch.restart if launch.store_is_held else 0}", store)


@contextmanager
def open_runtime(launch: Launch, device: str = "auto", timeout_s: float = 120.0) -> Iterator[Runtime]:
    """A Runtime for ``launch``, with a process group where there are several ranks; closed again at the end.

    gloo carries CPU tensors and nccl CUDA tensors, in one group. ``timeout_s`` bounds every wait for a peer.
    """
    target = devices.choose(device, launch.local_rank, launch.local_world_size, dealt=launch.by == "srun")
    if target.type == "cuda":
        torch.cuda.set_device(target)
    if launch.world_size == 1:
        yield Runtime(launch, target)
        return
    _choose_interface(launch)
    timeout = timedelta(seconds=timeout_s)
    try:
        store = _meet(launch, timeout_s)
        backend = "gloo" if target.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        raise LaunchError(
            f"rank {launch.rank} of {launch.world_size} could not meet its peers "
            f"at {launch.master_addr}:{launch.master_port}: {error}",
            hint="check that all nodes were started, with the same MASTER_ADDR, MASTER_PORT and number of nodes, that "
            f"the port is open, and that interface {os.environ.get('GLOO_SOCKET_IFNAME') or 'of the default route'} "
            "leads to the others (GLOO_SOCKET_IFNAME; launch.interface)",
        ) from None
    runtime = Runtime(launch, target, store, _control=dist.new_group(backend="gloo", timeout=timeout))
    try:
        devices.check_own(runtime.gather((runtime.host, devices.card(target))))
        yield runtime
    finally:
        # After a failure peers may be gone, and nccl would wait for them. gloo does not, and aborts if it is left open.
        if target.type == "cpu" or (sys.exc_info()[0] is None and not runtime.failed):
            gc.collect()  # a sharded model holds the group, in circles, and gloo aborts if its threads outlive it
            dist.destroy_process_group()


def _choose_interface(launch: Launch) -> None:
    """Tell gloo which interface leads to the master.

    Left alone it binds the address that the host's name resolves to, which is often the loopback one, and ranks on
    other nodes never meet.
    """
    several_nodes = launch.world_size > launch.local_world_size
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_towards(launch.master_addr, several_nodes)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
