"""What runs on a Dask worker: a task that starts one rank and answers for it, and what the client asks beside it.

A rank is a process of its own, so a worker never imports torch. What it prints and writes is told live as events of
topic ``apex-harness-JOB``; files are carried by ``dask_disk``.
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

from harness.distributed.worker_group import Gang
from harness.engines.base import driver
from harness.engines.dask.reservation import KEYS
from harness.errors import LaunchError
from harness.runs import layout
from harness.runs.storage import working_folder
from harness.version import __version__

_TELL_S = 0.2  # between two looks at what a rank has written
_MOST_BYTES = 1 << 20  # of one file in one event
_KEEP_S = 600.0  # how long the files of a job that was given up stay here, for a client who wants them


@dataclass(frozen=True)
class Order:
    """What all workers of a job are told about it."""

    job: str
    config: str
    """The resolved configuration, as YAML."""
    words: tuple[str, ...]
    """Further words of the command line; {scratch} in them is the worker's folder for this job."""
    run_folder: str
    """Where rank 0 writes, {scratch} likewise."""
    url: str
    """Where the run is kept, if that is a URL; each machine then has a folder of its own for it."""
    cache_dir: str | None
    working_folder: str
    """Where a rank starts and finds relative paths; empty: where the worker was started."""
    python: str | None
    grace_s: float


@dataclass
class _Held:
    """A job on this worker."""

    order: Order
    scratch: Path
    begin: threading.Event = field(default_factory=threading.Event)
    gangs: dict[int, Gang] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    asked: int = 0
    port: socket.socket | None = None

    def filled(self, text: str) -> str:
        return text.replace("{scratch}", str(self.scratch))


_jobs: dict[str, _Held] = {}


# Asked by the client, beside the tasks


def look(marker: str, dask_worker: Any) -> dict[str, Any]:
    """What this worker is, and whether it sees the file ``marker`` of the client."""
    return {
        "host": socket.gethostname(),
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "sees": bool(marker) and os.path.exists(marker),
        "versions": {"harness": __version__, "torch": _version("torch"), "python": sys.version.split()[0]},
    }


def prepare(order: Order, dask_worker: Any) -> None:
    """Make a folder for the job; its tasks may come from now on, and only to this process."""
    scratch = scratch_of(order.job, dask_worker)
    scratch.mkdir(parents=True)
    (scratch / layout.CONFIG).write_text(order.config, encoding="utf-8")
    driver(order.working_folder)
    _jobs[order.job] = _Held(order, scratch)


def hold_port(job: str, dask_worker: Any) -> int:
    """A free port of this machine, for the store in which the ranks meet. It stays bound here, without listening, so
    that nobody is given it before rank 0 listens there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0 sets it too, and may bind beside us
    held.bind(("", 0))
    _jobs[job].port = held
    return int(held.getsockname()[1])


def begin(job: str) -> None:
    """All ranks have their places, and the files they need: start them."""
    _jobs[job].begin.set()


def stop(job: str) -> None:
    """Ask the ranks here to write a checkpoint and end; called again, end them at once."""
    if held := _jobs.get(job):
        held.asked += 1
        if held.asked > 1:
            for gang in held.gangs.values():
                gang.stop()


def forget(job: str) -> None:
    """Remove what the job left on this worker."""
    if held := _jobs.pop(job, None):
        if held.port is not None:
            held.port.close()
        shutil.rmtree(held.scratch, ignore_errors=True)


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
    """Start the rank and stay with it; returns its exit code, or minus the signal it died of. ``environ``: variables
    beside those of the worker. ``files``: those of the run folder whose lines are told live.

    Where the task is no longer wanted (cancelled, its client or the scheduler gone, the worker closing), the rank is
    asked to write a checkpoint and end.
    """
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()
    held = _jobs.get(job)
    if held is None or rank in held.seen:
        # Dask runs a task again whose worker died. A rank alone, without its peers, is of no use.
        raise LaunchError(f"rank {rank} was placed on {worker.address}, which was started anew since")
    held.seen.add(rank)
    topic = f"{KEYS}{job}"

    def tell(**news: Any) -> None:
        worker.log_event(topic, {"rank": rank, **news})

    def wanted() -> bool:
        task = worker.state.tasks.get(key)
        return worker.status.name in ("running", "paused") and task is not None and task.state == "executing"

    tell(here=socket.gethostname(), worker=worker.address)
    try:
        while not held.begin.wait(0.05):
            if not wanted() or held.asked:
                raise LaunchError(f"rank {rank} was given up before it began")
        code = _attend(held, rank, environ, files, tell, wanted)
    except OSError as error:
        raise LaunchError(f"rank {rank} cannot be started on {worker.address}: {error}") from None
    finally:
        if not wanted():
            cleaning = threading.Timer(_KEEP_S, forget, [job])  # the client, who would ask for that, may be gone
            cleaning.daemon = True
            cleaning.start()
    tell(exit=code)
    return code


def _attend(
    held: _Held, rank: int, environ: dict[str, str], files: Sequence[str],
    tell: Callable[..., None], wanted: Callable[[], bool],
) -> int:  # fmt: skip
    """Run the rank to its end, telling of what it writes."""
    order = held.order
    folder = order.working_folder or os.getcwd()
    terminal = held.scratch / f"terminal-{rank}.txt"
    run_folder = working_folder(order.url, order.cache_dir) if order.url else Path(held.filled(order.run_folder))
    streams = {"terminal": Tail(terminal)} | {name: Tail(run_folder / name) for name in files}
    command = [order.python or sys.executable, str(driver(folder)), "-c", str(held.scratch / layout.CONFIG)]
    gang = Gang(
        [*command, *map(held.filled, order.words)], {rank: {**os.environ, **environ}},
        order.grace_s, folder, terminal,
    )  # fmt: skip
    held.gangs[rank] = gang
    looked, given_up = 0.0, False

    def tell_lines() -> bool:
        news = {name: lines for name, stream in streams.items() if (lines := stream.read())}
        for name, lines in news.items():
            tell(file=name, lines=lines)
        return bool(news)

    def meanwhile() -> None:
        nonlocal looked, given_up
        if not given_up and (held.asked or not wanted()):
            given_up = True
            gang.stop()
        if (now := time.monotonic()) > looked + _TELL_S:
            looked = now
            tell_lines()

    code = gang.follow(meanwhile).exits[rank]
    while tell_lines():
        pass
    return code


class Tail:
    """The lines that a file grows by, from its present end on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._size()

    def read(self) -> list[str]:
        """The whole lines that came since the last call; a file that was cut is read on from where it was cut."""
        self._offset = min(self._offset, self._size())
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read(_MOST_BYTES).rpartition(b"\n")
        except OSError:
            return []
        self._offset += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines() if newline else []

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0
