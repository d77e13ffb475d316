"""The launch environment, and what the ranks do together: reductions, gathers, verdicts.

The only reader of RANK, WORLD_SIZE, SLURM_* and their kin. Every collective here also works without a process group,
where a rank is alone; every one must be reached by all ranks.
"""

from __future__ import annotations

import gc
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from harness import devices
from harness.errors import HarnessError, LaunchError
from harness.network import interface_towards

Value = TypeVar("Value")

_PATIENCE_S = 5.0  # between two signs of life while something takes long
_BY = "HARNESS_LAUNCHED_BY"
_STORE_IS_HELD = "TORCHELASTIC_USE_AGENT_STORE"
_TORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HINT = "start it with python -m torch.distributed.launch --nproc_per_node=N driver.py …, or unset the variables"


@dataclass(frozen=True)
class Launch:
    """Where this process stands among its peers, as the launcher said it."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    by: str = "one process"
    elastic: bool = False  # torch's launcher, which ends all ranks of a node at the first that leaves
    supervised: bool = False  # started by a process that answers for this one, and that it does not outlive
    restart: int = 0
    store_is_held: bool = False  # somebody else listens at the master's port, so rank 0 is not to open a store there
    error_file: str = ""  # where torch's launcher looks for a rank's last words


def detect(environ: Mapping[str, str], local_rank: int | None = None) -> Launch:
    """The launch that ``environ`` describes: a complete set of torch's variables, else Slurm's, else one process.

    ``local_rank`` is what the command line said (``--local_rank`` or ``--local-rank``), which must agree.
    Raises LaunchError for an incomplete set, a number out of range or a contradiction; nothing is guessed.
    """
    in_slurm = "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ
    begun = [name for name in _TORCH if name in environ and not (in_slurm and name.startswith("MASTER"))]
    if begun:
        if local_rank is not None and "LOCAL_RANK" not in environ:
            environ = {**environ, "LOCAL_RANK": str(local_rank)}
        launch = _from_torch(environ)
    elif in_slurm:
        launch = _from_slurm(environ)
    else:
        launch = Launch()
    if local_rank is not None and local_rank != launch.local_rank:
        raise LaunchError(
            f"--local_rank={local_rank} contradicts local rank {launch.local_rank} of the environment ({launch.by})",
            hint="drop --local_rank, or start the script with the launcher that sets both",
        )
    return launch


def environment(launch: Launch) -> dict[str, str]:
    """What ``detect`` reads as ``launch``, for whoever starts a rank; ``by`` is set where an engine of ours does."""
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


def gang_environment(rank: int, world_size: int, port: int, by: str) -> dict[str, str]:
    """That of ``rank`` of a gang on this machine, whose parent holds the store at ``port``."""
    launch = Launch(rank, rank, world_size, world_size, "127.0.0.1", port, by, supervised=True, store_is_held=True)
    return environment(launch)


def _from_torch(environ: Mapping[str, str]) -> Launch:
    missing = [name for name in _TORCH if not environ.get(name)]
    if missing:
        found = ", ".join(f"{name}={environ[name]}" for name in _TORCH if name in environ)
        raise LaunchError(
            f"the launch environment is incomplete: found {found}; missing {', '.join(missing)}", hint=_HINT
        )
    elastic = "TORCHELASTIC_RUN_ID" in environ
    world_size = _number(environ, "WORLD_SIZE", 1)
    local_world_size = (
        _number(environ, "LOCAL_WORLD_SIZE", 1, world_size) if "LOCAL_WORLD_SIZE" in environ else world_size
    )
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
        restart=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0) if "TORCHELASTIC_RESTART_COUNT" in environ else 0,
        store_is_held=environ.get(_STORE_IS_HELD) == "True",
        error_file=environ.get("TORCHELASTIC_ERROR_FILE", ""),
    )


def _from_slurm(environ: Mapping[str, str]) -> Launch:
    """One task of an srun step. The port follows from the job's number, so that all ranks agree without talking."""
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS", 1)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or ""
    if not nodes and "MASTER_ADDR" not in environ:
        raise LaunchError("Slurm's environment names no node list (SLURM_STEP_NODELIST)", hint="export MASTER_ADDR")
    job, step = (_number(environ, n, 0) if n in environ else 0 for n in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    # Steps of one job may run side by side on one node.
    port = _number(environ, "MASTER_PORT", 0, 65535) if "MASTER_PORT" in environ else 20000 + (job + 97 * step) % 20000
    per_node = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1")))
    return Launch(
        rank=_number(environ, "SLURM_PROCID", 0, world_size - 1),
        local_rank=_number(environ, "SLURM_LOCALID", 0, world_size - 1),
        world_size=world_size,
        local_world_size=int(per_node.group()) if per_node else 1,
        master_addr=environ.get("MASTER_ADDR") or first_host(nodes),
        master_port=port,
        by="srun",
    )


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: "node[03-07,9],x" is node03, "rack[1-2]n[3-4]" is rack1n3."""
    match = re.match(r"(?:[^,\[\]]|\[\w[^\]]*\])+", nodelist)
    if not match:
        raise LaunchError(f"the node list {nodelist!r} cannot be read", hint="export MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match.group())


def _number(environ: Mapping[str, str], name: str, low: int, high: int | None = None) -> int:
    try:
        value = int(environ[name])
    except KeyError:
        raise LaunchError(f"the launch environment is incomplete: {name} is missing", hint=_HINT) from None
    except ValueError:
        raise LaunchError(f"{name}={environ[name]!r} is not a whole number", hint=_HINT) from None
    if value < low or (high is not None and value > high):
        allowed = f"from {low} to {high}" if high is not None else f"{low} or more"
        raise LaunchError(f"{name}={value} is out of range: {allowed}", hint=_HINT)
    return value


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
