"""Runs a measurement on several ranks of this machine, each a process of its own."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import distributed


def free_port() -> int:
    """A free TCP port below 32768, where Linux begins to give ports to outgoing connections."""
    for port in random.sample(range(20_000, 32_768), 100):
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("", port))
            return port
    raise RuntimeError("100 ports from 20000 to 32767 were tried, and all are in use")


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, group: bool = True) -> list[Any]:
    """Call ``function(*args)``, a module-level function, on ``world_size`` ranks; return the values by rank.

    With ``group``, a gloo process group exists around the call. Raises the exception of the first rank that fails.
    """
    port = free_port()
    values = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(_rank, (world_size, port, function, args, group, values), nprocs=world_size)
    return [value for _, value in sorted((values.get() for _ in range(world_size)), key=lambda found: found[0])]


def _rank(
    rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], group: bool, values: Any
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    multiprocessing.set_start_method("fork", force=True)  # for loader workers; only the ranks need fresh processes
    torch.set_num_threads(1)
    if group:
        distributed.init_process_group("gloo")
    values.put((rank, function(*args)))
    if group:
        distributed.destroy_process_group()
