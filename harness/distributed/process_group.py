"""Opens the process group of the ranks, and closes it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from harness.distributed import devices
from harness.distributed.agreement import Facts
from harness.distributed.collectives import NCCL_S
from harness.distributed.launch_env import Launch, detect
from harness.distributed.meeting import meet, telling_peers
from harness.distributed.network import interface_towards
from harness.distributed.processes import Identity
from harness.distributed.runtime import Runtime
from harness.distributed.store import LimitedStore, PeersMissing, address
from harness.distributed.threads import Background
from harness.errors import first_line

_CLOSE_S = 5.0  # for the threads of gloo to end


@contextmanager
def open_runtime(
    launch: Launch | None = None,
    device: str = "auto",
    timeout_s: float = 600.0,
    work_timeout_s: float = 1800.0,
    *,
    facts: Callable[[torch.device], Sequence[Facts]] = lambda target: (),
) -> Iterator[Runtime]:
    """Open a Runtime for ``launch``, by default that of the environment, with a process group if there are several
    ranks; close it at the end of the body.

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
        own_facts = facts(target) if launch.world_size > 1 else ()
    if launch.world_size == 1:
        yield Runtime(launch, target, None, timeout_s, work_timeout_s)
        return
    store = meet(launch, target.type, timeout_s)
    runtime = _connect(launch, target, store, timeout_s, work_timeout_s)
    try:
        runtime.peers = runtime.gather(Identity.of_this_process())
        runtime.all_agree(own_facts)
        yield runtime
    finally:
        _close(target, failed=sys.exc_info()[0] is not None or runtime.failed)


def _close(target: torch.device, failed: bool) -> None:
    """Close the process group, unless nccl would wait for peers that may be gone after a failure."""
    if target.type == "cuda" and failed:
        return
    # A sharded model keeps the group alive in reference cycles, and gloo aborts if its threads outlive it.
    gc.collect()
    if target.type == "cuda":
        dist.destroy_process_group()
    else:  # gloo aborts if left open, and one of its threads may wait for a peer that is frozen
        wait([Background(dist.destroy_process_group, "harness-close")], _CLOSE_S)


def _connect(
    launch: Launch, target: torch.device, store: PrefixStore, timeout_s: float, work_timeout_s: float
) -> Runtime:
    """Open the process group of the ranks, through ``store``."""
    _choose_interface(launch)
    if target.type == "cuda":
        os.environ.setdefault("NCCL_DEBUG", "WARN")  # else NCCL keeps the cause of an error to itself
    timeout = timedelta(seconds=timeout_s)
    try:
        backend = "gloo" if target.type == "cpu" else "cpu:gloo,cuda:nccl"
        limit = timeout if target.type == "cpu" else timedelta(seconds=timeout_s + NCCL_S)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=limit)
        control = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
    except (RuntimeError, ValueError, OSError) as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or "of the default route"
        names = "GLOO_SOCKET_IFNAME" if target.type == "cpu" else "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        hint = f"check that the interface {interface} reaches the other machines ({names}; launch.interface)"
        message = f"the ranks met at {address(launch)}, but could not all connect to each other: {first_line(error)}"
        raise PeersMissing(message, hint=hint) from None
    return Runtime(launch, target, LimitedStore(store), timeout_s, work_timeout_s, group=control)


def _choose_interface(launch: Launch) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that leads to the master.

    By default gloo binds the address that the host name resolves to. That is often a loopback address, which ranks on
    other nodes cannot reach.
    """
    several_nodes = launch.world_size > launch.local_world_size
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_towards(launch.master_addr, several_nodes)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
