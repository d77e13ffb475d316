"""Runs a function on several ranks, each a real process in one gloo group, with a time limit.

The processes are forked from a server that has already imported torch, so that two ranks start in a fraction of a
second and share nothing with the test's own process.
"""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ENVIRON = dict(os.environ)  # before any test has changed it
_sockets: list[socket.socket] = []  # that keep ports
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "tests.preload"])


class RankFailure(AssertionError):
    """A rank raised an exception, died or exceeded the time limit."""


@cache
def _ports() -> Iterator[int]:
    """Of the thousand ports of this pytest worker, below 32768, where Linux begins to give ports to outgoing
    connections."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    first = 10_000 + 1000 * (worker % 10)
    return (first + number % 1000 for number in itertools.count(random.SystemRandom().randrange(1000)))


def free_port() -> int:
    """A free TCP port, which no other caller gets, in any process, until this process ends."""
    for port in itertools.islice(_ports(), 1000):
        sock = socket.socket()
        try:
            sock.bind(("", port))
        except OSError:
            sock.close()
            continue
        # A socket that sets this, too, may now listen on the port, as torch's store does; the one of the next call
        # does not set it before it binds.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _sockets.append(sock)
        return port
    raise RuntimeError("all ports of this pytest worker are in use")


def launch_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment that ``torch.distributed.launch`` sets for ``rank`` on one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@cache
def start_server() -> None:
    """Start the fork server as before the first test. It looks for modules to preload in its own folder only, ignores
    those that it does not find, and passes its environment on to every rank (Python 3.11)."""
    folder, environ = os.getcwd(), dict(os.environ)
    os.chdir(Path(__file__).resolve().parent.parent)
    os.environ.clear()
    os.environ.update(ENVIRON)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environ)


def share_server() -> None:
    """Let this process, a fork of one that may have started the server, use the same one."""
    server: Any = forkserver._forkserver
    if server._forkserver_address is None:
        return
    server.ensure_running = resource_tracker.ensure_running  # not a child of this process, which cannot ask after it
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the first process keeps it alive
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None


def start(function: Callable, args: tuple = (), environ: dict[str, str] | None = None):
    """Start ``function(*args)`` in a new process; return (process, connection that receives its result)."""
    start_server()
    receiver, sender = _context.Pipe(duplex=False)
    process = _context.Process(target=_entry, args=(sender, function, args, environ or {}))
    process.start()
    sender.close()
    return process, receiver


def run_ranks(world_size: int, function: Callable, *args: Any, timeout_s: float = 60, group: bool = True) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` ranks; return each rank's value, by rank.

    ``function`` must be importable (module level). With ``group`` a default gloo process group exists around the call.
    Raises RankFailure with the traceback of the first rank that fails. No process is left when it returns.
    """
    port = free_port()
    body = _in_group if group else _call
    ranks = [start(body, (function, args), launch_environment(rank, world_size, port)) for rank in range(world_size)]
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    waiting = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    try:
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    os.kill(ranks[rank][0].pid, signal.SIGABRT)  # it writes where its threads are to the standard error
                raise RankFailure(f"ranks {sorted(waiting.values())} were still running after {timeout_s} s")
            for receiver in ready:
                rank = waiting.pop(receiver)
                try:
                    kind, value = receiver.recv()
                except EOFError:
                    ranks[rank][0].join(5)
                    raise RankFailure(f"rank {rank} died, exit code {ranks[rank][0].exitcode}") from None
                if kind == "error":
                    raise RankFailure(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(world_size)]
    finally:
        for process, _ in ranks:
            process.join(5 if not waiting else 0.5)
            if process.is_alive():
                process.kill()
                process.join()


def wait_for(processes: list, timeout_s: float) -> list[int]:
    """Wait for processes of ``start``; return exit codes. After ``timeout_s``, kill them and raise RankFailure."""
    deadline = time.monotonic() + timeout_s
    try:
        for process, _ in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        running = [index for index, (process, _) in enumerate(processes) if process.is_alive()]
        if running:
            raise RankFailure(f"ranks {running} were still running after {timeout_s} s")
        return [process.exitcode for process, _ in processes]
    finally:
        for process, receiver in processes:
            receiver.close()
            if process.is_alive():
                process.kill()
                process.join()


def _entry(sender, function, args, environ) -> None:
    assert "tests.preload" in sys.modules, "the fork server has not imported it, so that every rank would"
    os.environ.update(environ)
    # As in a process that a launcher starts; otherwise a rank's children would need a slow fork server of their own.
    multiprocessing.set_start_method("fork", force=True)
    import torch

    torch.set_num_threads(1)  # ranks share the machine's cores
    faulthandler.enable()
    try:
        sender.send(("value", function(*args)))
    except SystemExit as stop:
        sender.send(("exit", stop.code))
        raise
    except BaseException:
        sender.send(("error", traceback.format_exc()))
        raise SystemExit(1) from None


def _call(function, args):
    return function(*args)


def _in_group(function, args):
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()
