"""Collectives of the harness: reductions, gathers, and errors that all ranks raise together.

Every rank must reach every one of them. All also work for a single rank without a process group. The stages:

    stage       may be longer than timeout_s  may hold collectives  an error is raised on  limits a single rank, too
    together    no                            no                    all ranks              no
    patiently   yes, up to work_timeout_s     no                    all ranks              yes
    announced   yes, up to work_timeout_s     yes                   this rank              yes
    limited     no                            yes                   this rank              yes
"""

from __future__ import annotations

import gc
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world

from harness.distributed import devices, stack
from harness.distributed.agreement import Facts, disagreement
from harness.distributed.launch_env import Launch, detect
from harness.distributed.meeting import meet, telling_peers
from harness.distributed.network import interface_towards
from harness.distributed.processes import Identity
from harness.distributed.store import LimitedStore, PeersMissing, address
from harness.distributed.threads import Background
from harness.errors import (
    HarnessError,
    OwnCodeError,
    TrainingError,
    first_line,
    is_of_machine,
    portable,
    readable,
    users_line,
)

Value = TypeVar("Value")

# So long after timeout_s, torch's own watchdog dumps what NCCL was doing and aborts the process. Before, that of the
# harness finds the missing rank, gives the main thread its grace, and writes the record, which takes up to 30 s.
_NCCL_S = 45.0
_LONGEST_S = 1e8  # three years: timedelta and torch's milliseconds have no infinity
_CLOSE_S = 5.0  # for the threads of gloo to end
_HEARTBEAT_S = 5.0  # at most, between two heartbeats in patiently(), and a quarter of timeout_s
_ROUNDS = 6  # heartbeats after the first failure in patiently(): if all ranks fail alike, the lowest is to be named
_OF_THREADS = "harness threads"  # describes the groups of new_group()


@dataclass
class Runtime:
    """One rank: its launch environment, its device, and the collectives of the harness."""

    launch: Launch = field(default_factory=Launch)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: LimitedStore | None = None
    """Torch's key-value store, where there is a process group."""
    timeout_s: float = math.inf
    """How long a rank may be silent: the limit of a wait for a peer."""
    work_timeout_s: float = math.inf
    """How long announced work may take."""
    peers: Sequence[Identity] = ()
    """The processes of all ranks, by rank, where there is a process group."""
    failed: bool = False
    """Set when this rank reports a failure, its own or a consequence of another's."""
    alone_in: tuple[str, float] | None = None
    """With one rank, what it does, and the seconds that it may take: ``limited`` sets it, the watchdog enforces it."""
    group: Any = None
    """A gloo group for Python objects and flags, separate from that of the gradients; None without a process group."""
    _in_announced: bool = False

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def world_size(self) -> int:
        return self.launch.world_size

    def new_group(self) -> Any:
        """Return a gloo group of all ranks for the collectives of another thread, which does announced work.
        Collective."""
        if self.world_size == 1:
            return None
        return dist.new_group(backend="gloo", timeout=_timedelta(self.work_timeout_s), group_desc=_OF_THREADS)

    @property
    def limit_s(self) -> float:
        """The limit of a wait for a peer at present."""
        return self.work_timeout_s if self._in_announced else self.timeout_s

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
        """Every rank's ``value`` (picklable), by rank, on all ranks."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_to_first(self, value: Value) -> list[Value]:
        """Every rank's ``value`` (picklable), by rank, on rank 0; an empty list elsewhere."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group)
        return values or []

    def from_first(self, value: Value) -> Value:
        """Rank 0's ``value`` (picklable) on all ranks."""
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

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """A stage that all ranks enter: if any rank raises in it, all ranks raise, so that none waits for another.

        The body must not contain a collective. All ranks raise the error of the lowest failing rank, with that rank in
        ``origin_rank``; of another class than HarnessError, the others raise its text, with what they were ``doing``.

        ``sys.exit`` in the user's code is such an error. KeyboardInterrupt is not: this process is to end at once, and
        must not wait for the others, which lose its connection. Nor is anything that ends a forked process, whose
        collectives are those of its parent.
        """
        mine: Exception | SystemExit | None = None
        process = os.getpid()
        try:
            yield
        except (Exception, SystemExit) as error:
            if os.getpid() != process:
                raise
            mine = error
        if self.world_size > 1:
            # An error that an inner stage has raised on several ranks keeps the rank that it comes from.
            origin = getattr(mine, "origin_rank", None)
            own = None if mine is None else (_portable(mine, doing), self.rank if origin is None else origin)
            errors = self.gather(own)
            theirs = next((error for error in errors if error is not None), None)
            if theirs is not None and (mine is None or theirs is not errors[self.rank]):  # else its traceback is here
                theirs[0].origin_rank = theirs[1]
                raise theirs[0]
        if mine is not None:
            raise mine

    def patiently(self, doing: str, work: Callable[[], Value], limit_s: float | None = None) -> Value:
        """Return ``work()``, which a thread does while the ranks exchange heartbeats: it may take long, but must not
        contain a collective. If any rank raises, all ranks raise; work that is not done then goes on in its thread, and
        nobody waits for it. Collective.

        Raises TrainingError if a rank works longer than ``limit_s``, by default ``work_timeout_s``. Give infinity for
        work that has a limit of its own.
        """
        if self.world_size == 1:
            with self.limited(doing, self.work_timeout_s if limit_s is None else limit_s):
                return work()
        return self.await_work(doing, Background(work, "harness-work"), limit_s)

    def await_work(self, doing: str, work: Background[Value], limit_s: float | None = None) -> Value:
        """Return ``patiently`` for work that every rank has already started."""
        limit_s = self.work_timeout_s if limit_s is None else limit_s
        if self.world_size == 1:
            with self.limited(doing, limit_s):
                return work.result()
        until, longest_s = time.monotonic() + limit_s, min(_HEARTBEAT_S, self.timeout_s / 4)
        pause_s, rounds = 0.05, 0
        while rounds < _ROUNDS:
            done = not wait([work], pause_s).not_done
            failed = done and work.exception() is not None
            late = "" if done or time.monotonic() < until else stack.thread_at(work.thread) or "a thread that has ended"
            ranks = self.gather((done, failed, late))
            if all(done for done, _, _ in ranks):
                break
            if overdue := [rank for rank, (_, _, late) in enumerate(ranks) if late]:
                raise _overdue(overdue[0], ranks[overdue[0]][2], doing, limit_s)
            # The ranks have seen the same answers, so they leave together.
            if rounds or any(failed for _, failed, _ in ranks):
                rounds, pause_s = rounds + 1, 0.05 * 2**rounds
            else:
                pause_s = min(2 * pause_s, longest_s)
        with self.together(doing):
            if done:
                return work.result()
        raise AssertionError("unreachable: a rank failed, so all ranks have raised")

    @contextmanager
    def announced(self, doing: str) -> Iterator[None]:
        """A stage with collectives in which the ranks wait ``work_timeout_s`` for each other, such as the first step of
        a compiled model. All ranks enter it, and leave it together. A rank that stops in it is found that late.

        An error of one rank is not shared: it ends the run as anywhere else.
        """
        if self.world_size == 1:
            with self.limited(doing, self.work_timeout_s):
                yield
            return
        self._bound(announced=True)
        try:
            yield
            self.barrier()  # a rank must not wait for timeout_s only, while another still does the work
        finally:
            self._bound(announced=False)

    @contextmanager
    def limited(self, doing: str, limit_s: float | None = None) -> Iterator[None]:
        """A stage that the watchdog ends, with the process, if it takes the only rank longer than ``limit_s``, by
        default ``timeout_s``. Of several ranks, the others notice."""
        before = self.alone_in
        self.alone_in = (doing, self.timeout_s if limit_s is None else limit_s) if self.world_size == 1 else None
        try:
            yield
        finally:
            self.alone_in = before

    def _bound(self, announced: bool) -> None:
        """Bound the collectives that start from now on, in all groups but those of other threads."""
        self._in_announced = announced
        for group in main_groups() if self.group is not None else ():
            with_nccl = "nccl" in str(dist.get_backend_config(group))
            _set_timeout(_timedelta(self.limit_s + _NCCL_S * with_nccl), group)

    def all_equal(self, value: Any, what: str, hint: str) -> None:
        """Raise LaunchError unless every rank holds the same ``value`` for ``what``. Collective."""
        self.all_agree([Facts(hint, {what: value})])

    def all_agree(self, facts: Sequence[Facts]) -> None:
        """Raise LaunchError, which lists what differs, unless all ranks have the same ``facts``. Collective."""
        theirs = self.gather(facts)
        if theirs.count(facts) < len(theirs):  # quick, also for a thousand ranks
            hosts = {rank: process.host for rank, process in enumerate(self.peers)}
            if found := disagreement(dict(enumerate(theirs)), hosts):
                raise found


def main_groups() -> list[Any]:
    """Return the process groups whose collectives the main thread starts."""
    return [group for group in list(_world.pg_names) if group.group_desc != _OF_THREADS]


def _set_timeout(limit: timedelta, group: Any) -> None:
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(limit, group)
    else:  # in older versions of torch
        distributed_c10d._set_pg_timeout(limit, group)


def _timedelta(seconds: float) -> timedelta:
    return timedelta(seconds=min(seconds, _LONGEST_S))


def _overdue(rank: int, where: str, doing: str, limit_s: float) -> TrainingError:
    """Return the error of all ranks because ``rank`` still works, in ``where``."""
    error = TrainingError(
        f"rank {rank} has not finished after {limit_s:g} s: {doing}, in {where}",
        hint="if this work is merely slow, raise runtime.work_timeout_s; otherwise look at the disk or the server that "
        "it uses",
    )
    error.origin_rank = rank
    return error


def _portable(error: BaseException, doing: str) -> HarnessError:
    """Return ``error`` as a HarnessError that can be pickled."""
    known = portable(error) if isinstance(error, HarnessError) else None
    if isinstance(known, HarnessError):
        return known
    text, where = f"{doing}: {type(error).__name__}: {readable(error)}", users_line(error)
    return OwnCodeError(text, where=where) if where and not is_of_machine(error) else HarnessError(text)


@contextmanager
def open_runtime(
    launch: Launch | None = None,
    device: str = "auto",
    timeout_s: float = 600.0,
    work_timeout_s: float = 1800.0,
    *,
    facts: Callable[[torch.device], Sequence[Facts]] = lambda target: (),
) -> Iterator[Runtime]:
    """A Runtime for ``launch``, by default that of the environment, with a process group if there are several ranks;
    closed at the end of the body.

    One group uses gloo for CPU tensors and nccl for CUDA tensors. ``timeout_s`` bounds every wait for a peer,
    ``work_timeout_s`` work that the ranks have announced to each other.
    ``facts(device)``: the values that must be equal on all ranks. Raises LaunchError if they are not; PeersMissing if
    the ranks do not connect.
    """
    launch = launch or detect(os.environ)
    with telling_peers(launch):
        target = devices.choose(device, launch.local_rank, launch.local_world_size, may_be_isolated=launch.by == "srun")
        if target.type == "cuda":
            torch.cuda.set_device(target)
        own = facts(target) if launch.world_size > 1 else ()
    if launch.world_size == 1:
        yield Runtime(launch, target, None, timeout_s, work_timeout_s)
        return
    store = meet(launch, target.type, timeout_s)
    runtime = _connect(launch, target, store, timeout_s)
    runtime.work_timeout_s = work_timeout_s
    try:
        runtime.peers = runtime.gather(Identity.of_this_process())
        runtime.all_agree(own)
        yield runtime
    finally:
        # After a failure nccl would wait for peers that may be gone. gloo aborts if left open.
        no_failure = sys.exc_info()[0] is None and not runtime.failed
        if target.type == "cpu" or no_failure:
            # A sharded model keeps the group alive in reference cycles, and gloo aborts if its threads outlive it.
            gc.collect()
        if target.type == "cpu":
            # A thread of gloo may wait for a peer that is frozen.
            wait([Background(dist.destroy_process_group, "harness-close")], _CLOSE_S)
        elif no_failure:
            dist.destroy_process_group()


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
        what = f"the ranks met at {address(launch)}, but could not all connect to each other: {first_line(error)}"
        raise PeersMissing(what, hint=hint) from None
    return Runtime(launch, target, LimitedStore(store), timeout_s, group=control)


def _choose_interface(launch: Launch) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that leads to the master.

    By default gloo binds the address that the host name resolves to. That is often a loopback address, which ranks on
    other nodes cannot reach.
    """
    several_nodes = launch.world_size > launch.local_world_size
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_towards(launch.master_addr, several_nodes)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
