"""Engine dask: ranks on the workers of a Dask cluster, each a process that its worker supervises.

harness launch -c configs/digits.yaml --engine dask --nproc 4 launch.dask.scheduler=tcp://10.0.0.1:8786
engine.run(client, "configs/digits.yaml")     # in a notebook, with your distributed.Client
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from harness.distributed.launch_env import Launch, environment
from harness.distributed.monitor import follow_until_done
from harness.distributed.threads import Background
from harness.engines.base import Job, plan, refuse, shell, train_command
from harness.engines.dask.cluster_run import BY, ClusterRun
from harness.errors import LaunchError, plural
from harness.runs.outcome import ExitCollector, RunOutcome

_CLOSE_S = 5.0


def render(job: Job) -> str:
    _check(job)
    settings, world = job.settings.engine_settings, job.world_size
    where = settings.scheduler or f"a cluster on this machine with {plural(world, 'single-threaded worker')}"
    symbols: dict[str, Any] = {"rank": "R", "local_rank": "L", "local_world_size": "N", "master_port": "PORT"}
    launch = Launch(**symbols, world_size=world, master_addr="ADDRESS", by=BY, supervised=True)
    takes = f", resources={settings.resources}" if settings.resources else ""
    command = [job.settings.python or "PYTHON", *train_command(), "-c", "CONFIG"]
    return (
        f"# {where}: {plural(world, 'free thread')} within {settings.timeout_s:g} s, or nothing starts\n"
        f"client.submit(supervise, TOPIC, MARKER, pure=False{takes})\n"
        f"# each starts one rank: R is 0 to {world - 1}, L its number among the N ranks on its machine; ADDRESS "
        "and PORT are those of rank 0\n"
        f"# PYTHON is the worker's; CONFIG is the resolved configuration, which is sent to the worker\n"
        f"{shell(command, job.environ() | environment(launch))}\n"
    )


def start(job: Job) -> ClusterRun:
    _check(job)
    with ExitStack() as opened:
        client = _connect(job, opened)
        return ClusterRun.start(client, job, opened.pop_all())


def run(client: Any, config: str | Path, overrides: Sequence[str] = ()) -> RunOutcome:
    """Train the YAML file ``config`` on the cluster of ``client``. Returns the exit code that the command would have,
    and a report as text.

    Starts ``launch.nnodes`` times ``launch.nproc`` ranks; the results are in OUTPUT/NAME on this machine, also while it
    trains. An interrupt ends the run with a checkpoint, and the same call resumes it. Raises ConfigError or LaunchError
    if nothing was started.
    """
    if client.asynchronous:
        raise LaunchError("this client is asynchronous", hint="pass a Client(…) created without asynchronous=True")
    job = plan(str(config), [*overrides, "launch.engine=dask"])
    _check(job)
    collector = ExitCollector(job.folder, job.world_size, job.url)
    outcome = collector.conclude(follow_until_done(lambda: ClusterRun.start(client, job, ExitStack())))
    print(outcome.text, file=sys.stderr)
    return outcome


def _check(job: Job) -> None:
    hint = "the same command resumes from the newest checkpoint; launch.engine=local or torchrun restarts it"
    refuse(job, "dask", max_restarts=hint)


def _connect(job: Job, opened: ExitStack) -> Any:
    """Return a client of the configured scheduler, or of a cluster on this machine that ends with the run."""
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
    try:
        # In a thread, since the Client waits without an end for a program that accepts connections and never answers.
        opening = Background(lambda: Client(address, timeout=timeout_s, set_as_default=False), "harness-dask")
        if wait([opening], timeout_s + _CLOSE_S).not_done:
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        client = opening.result()
    except Exception as error:  # of a program that is no scheduler, a MemoryError too
        raise LaunchError(
            f"the scheduler does not answer: {str(error).strip() or type(error).__name__}",
            where=str(address),
            hint="start one with `dask scheduler`, and give the address that it prints as launch.dask.scheduler; its "
            "port is usually 8786, that of its dashboard 8787",
        ) from None
    opened.callback(_close, client)
    return client


def _close(client: Any) -> None:
    with suppress(asyncio.TimeoutError, OSError):  # the scheduler may be gone
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
