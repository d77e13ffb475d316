"""The workers' side: a task that runs one rank, and functions that the client calls next to it.

A rank is a process of its own, so a worker never imports torch. What a rank prints and logs is sent as events of the
topic ``apex-harness-JOB``; other files are copied by ``harness.engines.dask.store``.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.distributed.worker_group import Worker, WorkerGroup
from harness.engines.base import train_command
from harness.engines.dask.reservation import KEYS
from harness.errors import LaunchError
from harness.runs import layout
from harness.runs.storage import working_folder
from harness.version import __version__

_EVENT_S = 0.2  # between two events with new lines
_MAX_EVENT_BYTES = 1 << 20  # per file and event
_KEEP_S = 600.0  # how long an abandoned job's files stay, for a client that still wants them


@dataclass(frozen=True)
class JobSpec:
    """The description of a job that its workers need."""

    job: str
    config: str
    """The resolved configuration, as YAML."""
    overrides: tuple[str, ...]
    """Further ``key=value`` words; {scratch} in them stands for the worker's folder for this job."""
    run_folder: str
    """Output folder of rank 0; {scratch} likewise."""
    url: str
    """URL of the run, if it is kept at one; each machine then has its own working folder for it."""
    cache_dir: str | None
    working_folder: str
    """Working folder of the ranks, for relative paths; empty: the worker's."""
    python: str | None
    grace_s: float


@dataclass
class _LocalJob:
    """The part of a job that is on this worker."""

    spec: JobSpec
    scratch: Path
    begin: threading.Event = field(default_factory=threading.Event)
    groups: dict[int, WorkerGroup] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)  # ranks whose task has run
    stops: int = 0
    port: socket.socket | None = None

    def filled(self, text: str) -> str:
        return text.replace("{scratch}", str(self.scratch))


_jobs: dict[str, _LocalJob] = {}


# Called by the client


def describe(marker: str, dask_worker: Any) -> dict[str, Any]:
    """Host, GPUs and versions of this worker, and whether it sees the client's file ``marker``."""
    return {
        "host": socket.gethostname(),
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "sees": bool(marker) and os.path.exists(marker),
        "versions": {"harness": __version__, "torch": _version("torch"), "python": sys.version.split()[0]},
    }


def prepare(spec: JobSpec, dask_worker: Any) -> None:
    """Make a folder for the job; from now on this process accepts its tasks."""
    scratch = scratch_of(spec.job, dask_worker)
    scratch.mkdir(parents=True)
    (scratch / layout.CONFIG).write_text(spec.config, encoding="utf-8")
    _jobs[spec.job] = _LocalJob(spec, scratch)


def hold_port(job: str, dask_worker: Any) -> int:
    """A free port of this machine for the ranks' rendezvous. It stays bound, without listening, so no other process
    gets it before rank 0 listens there."""
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0 sets it too, which lets both bind
    port.bind(("", 0))
    _jobs[job].port = port
    return int(port.getsockname()[1])


def begin(job: str) -> None:
    """Start the ranks: all have their workers and the files they need."""
    _jobs[job].begin.set()


def stop(job: str) -> None:
    """Ask the ranks here to write a checkpoint and exit; a second call kills them."""
    if local := _jobs.get(job):
        local.stops += 1
        if local.stops > 1:
            for group in local.groups.values():
                group.stop()


def forget(job: str) -> None:
    """Remove what the job left on this worker."""
    if local := _jobs.pop(job, None):
        if local.port is not None:
            local.port.close()
        shutil.rmtree(local.scratch, ignore_errors=True)


def scratch_of(job: str, dask_worker: Any) -> Path:
    """The folder of the job on this worker."""
    return Path(dask_worker.local_directory).absolute() / f"{KEYS}{job}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# The task


def supervise(job: str, rank: int, environ: dict[str, str], files: Sequence[str]) -> int:
    """Run ``rank`` to its end; return its exit code, or minus the signal that killed it.

    ``environ`` is added to the worker's environment. New lines of ``files``, names in the run folder, are sent as
    events. If the task is no longer wanted (it was cancelled, the client or the scheduler is gone, or the worker is
    closing), the rank is asked to write a checkpoint and exit.
    """
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()
    local = _jobs.get(job)
    if local is None or rank in local.seen:
        # Dask repeats a task whose worker died. One rank alone, without its peers, is useless.
        raise LaunchError(f"rank {rank} was placed on {worker.address}, which has restarted since")
    local.seen.add(rank)

    def send(**facts: Any) -> None:
        worker.log_event(f"{KEYS}{job}", {"rank": rank, **facts})

    def wanted() -> bool:
        task = worker.state.tasks.get(key)
        return worker.status.name in ("running", "paused") and task is not None and task.state == "executing"

    send(here=socket.gethostname(), worker=worker.address)
    try:
        while not local.begin.wait(0.05):
            if not wanted() or local.stops:
                raise LaunchError(f"rank {rank} was canceled before it started")
        code = _run(local, rank, environ, files, send, wanted)
    except OSError as error:
        raise LaunchError(f"rank {rank} cannot be started on {worker.address}: {error}") from None
    finally:
        if not wanted():
            cleaning = threading.Timer(_KEEP_S, forget, [job])  # the client, which would clean up, may be gone
            cleaning.daemon = True
            cleaning.start()
    send(exit=code)
    return code


def _run(
    local: _LocalJob, rank: int, environ: dict[str, str], files: Sequence[str],
    send: Callable[..., None], wanted: Callable[[], bool],
) -> int:  # fmt: skip
    spec = local.spec
    folder = spec.working_folder or os.getcwd()
    terminal = local.scratch / f"terminal-{rank}.txt"
    run_folder = working_folder(spec.url, spec.cache_dir) if spec.url else Path(local.filled(spec.run_folder))
    streams = {"terminal": Tail(terminal)} | {name: Tail(run_folder / name) for name in files}
    command = [spec.python or sys.executable, *train_command(folder), "-c", str(local.scratch / layout.CONFIG)]
    command += map(local.filled, spec.overrides)
    worker = Worker(command, {**os.environ, **environ}, folder, terminal)
    group = WorkerGroup({rank: worker}, spec.grace_s)
    local.groups[rank] = group
    sent_at, stopped = 0.0, False

    def send_lines() -> bool:
        news = {name: lines for name, stream in streams.items() if (lines := stream.read())}
        for name, lines in news.items():
            send(file=name, lines=lines)
        return bool(news)

    def poll() -> None:
        nonlocal sent_at, stopped
        if not stopped and (local.stops or not wanted()):
            stopped = True
            group.stop()
        if (now := time.monotonic()) > sent_at + _EVENT_S:
            sent_at = now
            send_lines()

    code = group.wait(poll)[rank]
    while send_lines():
        pass
    return code


class Tail:
    """Reads the lines that a file grows by, from its present end on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._size()

    def read(self) -> list[str]:
        """The complete lines added since the last call. After a truncation, reading continues at the new end."""
        self._offset = min(self._offset, self._size())
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read(_MAX_EVENT_BYTES).rpartition(b"\n")
        except OSError:
            return []
        self._offset += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines() if newline else []

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0
