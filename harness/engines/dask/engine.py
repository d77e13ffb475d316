"""Engine dask: ranks on the workers of a Dask cluster, each a process that its worker supervises.

harness launch -c configs/digits.yaml --engine dask --scheduler tcp://10.0.0.1:8786 --nproc 4
engine.run(client, "configs/digits.yaml")     # in a notebook, with your distributed.Client
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from harness.config import loader
from harness.config.schema import Config
from harness.distributed.launch_env import Launch, environment
from harness.distributed.monitor import follow_until_done
from harness.engines.base import Job, plan, refuse, shell, train_command
from harness.engines.dask.cluster_run import BY, ClusterRun, Event
from harness.errors import LaunchError, plural
from harness.runs import layout
from harness.runs.outcome import ExitCollector, RunOutcome

_CLOSE_S = 5.0
_SILENT_S = 3.0  # before logging what it waits for
_PAUSE_S = 0.2  # between two attempts to connect
_GREETING_S = 5.0  # for a scheduler to send its first message, as it does at once on each connection
_MAX_GREETING_BYTES = 1 << 16  # it has some hundred
_DASHBOARD = "8787 is usually the port of Dask's dashboard"
_ANY_WORKER = "ranks go to any free workers; their number is launch.nnodes times launch.nproc"


def render(job: Job) -> str:
    _check(job)
    settings, world = job.settings.engine_settings, job.world_size
    where = settings.scheduler or f"a cluster on this machine with {plural(world, 'single-threaded worker')}"
    symbols: dict[str, Any] = {"rank": "R", "local_rank": "L", "local_world_size": "N", "master_port": "PORT"}
    launch = Launch(**symbols, world_size=world, master_addr="ADDRESS", by=BY, supervised=True)
    takes = f", resources={settings.resources}" if settings.resources else ""
    command = [job.settings.python or "PYTHON", *train_command(), "-c", "CONFIG"]
    return (
        f"# {where}: {plural(world, 'free worker')} within {settings.timeout_s:g} s, or nothing starts\n"
        f"client.submit(supervise, RANK, workers=[WORKER], allow_other_workers=False, pure=False{takes})\n"
        f"# each starts one rank: R is 0 to {world - 1}, L its number among the N ranks on its machine; ADDRESS "
        "and PORT are those of rank 0\n"
        f"# PYTHON is the worker's; CONFIG is the resolved configuration, which is sent to the worker\n"
        f"{shell(command, job.environ() | environment(launch))}\n"
    )


def start(job: Job) -> ClusterRun:
    _check(job)
    with ExitStack() as opened:
        client = _connect(job, opened)
        return ClusterRun(client, job, None, opened.pop_all())


def run(
    client: Any,
    config: str | Path | Mapping[str, Any] | Config,
    overrides: Sequence[str] = (),
    on_event: Callable[[Event], None] | None = None,
) -> RunOutcome:
    """Train ``config`` (the path of a YAML, its content as a dictionary, or a Config) on the cluster of ``client``.
    Returns the exit code that the command would have, and a report as text.

    Starts ``launch.nnodes`` times ``launch.nproc`` ranks; the results are in OUTPUT/NAME on this machine. An interrupt
    ends the run with a checkpoint, and the same call resumes it. ``on_event`` is called, in another thread, with every
    event: {"rank": 0, "file": "metrics.jsonl", "lines": […]}, and likewise for "terminal" and each log. Raises
    ConfigError or LaunchError if nothing was started.
    """
    if client.asynchronous:
        raise LaunchError("this client is asynchronous", hint="pass a Client(…) created without asynchronous=True")
    job = _job(config, overrides)
    _check(job)
    collector = ExitCollector(job.folder, job.world_size, job.url)
    outcome = collector.conclude(follow_until_done(lambda: ClusterRun(client, job, on_event, ExitStack())))
    print(outcome.text, file=sys.stderr)
    return outcome


def _job(config: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str]) -> Job:
    if isinstance(config, str | Path):
        return plan(str(config), [*overrides, "launch.engine=dask"])
    text = loader.to_text(config) if isinstance(config, Config) else yaml.safe_dump(dict(config))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / layout.CONFIG
        path.write_text(text, encoding="utf-8")
        return _job(path, overrides)


def _check(job: Job) -> None:
    refuse(
        job, "dask", min_nodes=_ANY_WORKER, rendezvous=_ANY_WORKER, node_rank=_ANY_WORKER,
        max_restarts="the same command resumes from the newest checkpoint; launch.engine=torchrun restarts the ranks",
    )  # fmt: skip


def _connect(job: Job, opened: ExitStack) -> Any:
    """A client of the configured scheduler, or of a cluster on this machine that ends with the run."""
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise LaunchError(
            f"engine dask needs dask.distributed: {error}", hint="pip install 'apex-harness[dask]'"
        ) from None
    settings = job.settings.engine_settings
    address, timeout_s = settings.scheduler, settings.timeout_s
    if address is None:
        with _interrupts_ignored():
            address = opened.enter_context(
                LocalCluster(
                    n_workers=job.world_size, threads_per_worker=1, processes=True, memory_limit=0,
                    dashboard_address=None, silence_logs=logging.ERROR,
                )
            )  # fmt: skip
    _wait_for_port(address, timeout_s)
    try:
        client = Client(address, timeout=timeout_s, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise _no_answer(str(address), str(error).strip() or type(error).__name__) from None
    opened.callback(_close, client)
    return client


def _wait_for_port(address: Any, timeout_s: float) -> None:
    """Wait until a scheduler listens at ``address``, and log it if that takes a while. Raises LaunchError.

    A Client that cannot connect logs nothing and fails half a minute after its timeout.
    """
    protocol, _, place = str(address).rpartition("://")
    host, _, port = place.rpartition(":")
    if not (host and port.isdigit()):
        return  # another protocol, or a wrong address: the Client reports it
    start, said = time.monotonic(), False
    while True:
        left = start + timeout_s - time.monotonic()
        try:
            limit_s = max(0.01, min(left, _SILENT_S))
            with socket.create_connection((host.strip("[]"), int(port)), timeout=limit_s) as connection:
                if protocol in ("", "tcp"):  # with TLS, the server waits for the client
                    _require_greeting(connection, address)
            return
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        if time.monotonic() - start > timeout_s:
            raise _no_answer(str(address), f"{reason} (retried for {timeout_s:g} s, launch.dask.timeout_s)")
        if not said and time.monotonic() - start > _SILENT_S:
            print(f"waiting for the Dask scheduler at {address}, up to {timeout_s:g} s: {reason}", file=sys.stderr)
            said = True
        time.sleep(_PAUSE_S)


def _require_greeting(connection: socket.socket, address: str) -> None:
    """Raise LaunchError unless a Dask scheduler is at the other end. OSError if it closes the connection."""
    connection.settimeout(_GREETING_S)
    try:
        head = connection.recv(8, socket.MSG_WAITALL)
    except TimeoutError:
        raise _no_answer(
            address,
            f"it accepted the connection, but sent nothing within {_GREETING_S:g} s: it is hung, or not a Dask "
            f"scheduler ({_DASHBOARD})",
        ) from None
    # The protocol of distributed: the number of bytes that follow.
    if not (head and 8 <= int.from_bytes(head, "little") <= _MAX_GREETING_BYTES):
        raise _no_answer(
            address, f"the program that listens there sends {head!r}, so it is not a Dask scheduler ({_DASHBOARD})"
        )


def _no_answer(address: str, reason: str) -> LaunchError:
    return LaunchError(
        f"the scheduler does not answer: {reason}",
        where=address,
        hint="start one with `dask scheduler`, and give the address that it prints as launch.dask.scheduler",
    )


def _close(client: Any) -> None:
    with suppress(TimeoutError, OSError):  # the scheduler may be gone
        client.close(timeout=_CLOSE_S)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Make processes that are started meanwhile ignore Ctrl-C, which a terminal sends to them too: this process stops
    the ranks, with a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
