"""The workers' side: a task that runs one rank.

A rank is a process of its own, so a worker never imports torch. What a rank prints and logs is sent as events of the
topic ``apex-harness-JOB``; other files are copied by ``run_files.RunFiles``. The client talks to a task with
``tell``, next to it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from harness.distributed.worker_group import Worker, WorkerGroup
from harness.engines.base import train_command
from harness.errors import LaunchError
from harness.runs.files import commit, temporary_for
from harness.runs.followed import FollowedFile
from harness.runs.storage import LocalStore

_EVENT_S = 0.2  # between two events with new lines that a rank prints
_POLL_S = 0.05
_KEEP_S = 600.0  # how long an abandoned job's files stay, for a client that still wants them
CHUNK_BYTES = 8 << 20
STOP = "stop"  # a message for ``tell``: write a checkpoint and exit; the second one kills the rank


@dataclass(frozen=True)
class RankJob:
    """The message that starts a rank, once all ranks have a worker."""

    rank: int
    environ: dict[str, str]
    """Added to the worker's environment."""
    config: str
    """The resolved configuration, as YAML."""
    overrides: tuple[str, ...]
    """Further ``key=value`` words."""
    working_folder: str
    """Working folder of the rank, for relative paths; empty: the worker's."""
    python: str | None
    grace_s: float


@dataclass(frozen=True)
class Place:
    """Where the task of a rank runs."""

    worker: str
    """Its address."""
    host: str
    port: int
    """A free one, at which the ranks meet if this is rank 0."""
    scratch: str
    """The job's folder on the worker."""
    devices: str | None
    """CUDA_VISIBLE_DEVICES of the worker."""
    sees_marker: bool
    """The client's disk is shared with the worker."""


@dataclass(frozen=True)
class TaskEvent:
    """What a task tells the client: first its place, then the lines that the rank prints, then how that ended."""

    key: str
    place: Place | None = None
    lines: Sequence[str] = ()
    exit: int | None = None
    """The exit code of the rank, or minus the signal that killed it."""


_inboxes: dict[str, SimpleQueue[Any]] = {}  # of the tasks of this process, by key


def tell(key: str, message: Any) -> None:
    """Send the task ``key`` of this worker a message: a RankJob, or STOP."""
    if inbox := _inboxes.get(key):
        inbox.put(message)


def forget(scratch: str) -> None:
    """Remove what a job left on this worker."""
    shutil.rmtree(scratch, ignore_errors=True)


def supervise(topic: str, marker: str) -> int:
    """Run a rank to its end; return its exit code, or minus the signal that killed it.

    The task sends its Place (``marker`` is a file of the client), and waits for its RankJob. If it is no longer wanted
    (it was cancelled, the client or the scheduler is gone, or the worker is closing), the rank is asked to write a
    checkpoint and exit.
    """
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()
    inbox = _inboxes[key] = SimpleQueue()
    scratch = Path(worker.local_directory).absolute() / topic

    def send(**news: Any) -> None:
        worker.log_event(topic, asdict(TaskEvent(key, **news)))

    def wanted() -> bool:
        task = worker.state.tasks.get(key)
        return worker.status.name in ("running", "paused") and task is not None and task.state == "executing"

    # A free port for the ranks to meet, if this is to be rank 0. It stays bound, without listening, so no other process
    # gets it before rank 0 listens there.
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0 sets it too, which lets both bind
        port.bind(("", 0))
        devices, sees_marker = os.environ.get("CUDA_VISIBLE_DEVICES"), os.path.exists(marker)
        host, number = socket.gethostname(), port.getsockname()[1]
        send(place=Place(worker.address, host, number, str(scratch), devices, sees_marker))
        try:
            start = None
            while start is None:
                start = _next(inbox)
                if start == STOP or not wanted():
                    raise LaunchError("a rank was canceled before it started")
            code = _run(start, scratch, inbox, lambda lines: send(lines=lines), wanted)
        except OSError as error:
            raise LaunchError(f"a rank cannot be started on {worker.address}: {error}") from None
        finally:
            del _inboxes[key]
            if not wanted():
                cleaning = threading.Timer(_KEEP_S, forget, [scratch])  # the client, which would do it, may be gone
                cleaning.daemon = True
                cleaning.start()
    send(exit=code)
    return code


def _run(
    start: RankJob,
    scratch: Path,
    inbox: SimpleQueue[RankJob | str],
    send: Callable[[list[str]], None],
    wanted: Callable[[], bool],
) -> int:
    """Run the rank of ``start`` to its end, while it is ``wanted``; return its exit code. ``send``: for its lines."""
    folder = start.working_folder or os.getcwd()
    config, terminal = scratch / f"config-{start.rank}.yaml", scratch / f"terminal-{start.rank}.txt"
    scratch.mkdir(parents=True, exist_ok=True)
    config.write_text(start.config, encoding="utf-8")
    followed = FollowedFile(terminal)
    command = [start.python or sys.executable, *train_command(folder), "-c", str(config), *start.overrides]
    worker = Worker(command, {**os.environ, **start.environ}, folder, terminal)
    group = WorkerGroup({start.rank: worker}, start.grace_s)
    sent_at = 0.0

    def send_lines(final: bool = False) -> bool:
        if lines := followed.read(final):
            send([line.decode(errors="replace") for line in lines])
        return bool(lines)

    def poll() -> None:
        nonlocal sent_at
        if _next(inbox, wait_s=0.0) == STOP or (group.num_stops == 0 and not wanted()):
            group.stop()
        if (now := time.monotonic()) > sent_at + _EVENT_S:
            sent_at = now
            send_lines()

    code = group.wait(poll)[start.rank]
    while send_lines(final=True):
        pass
    return code


def _next(inbox: SimpleQueue[Any], wait_s: float = _POLL_S) -> Any:
    """Return the next message; None if none comes within ``wait_s``."""
    try:
        return inbox.get(timeout=wait_s) if wait_s else inbox.get_nowait()
    except Empty:
        return None


# Files


async def call(folder: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(store, *arguments)`` for ``folder``, in a thread."""
    return await asyncio.to_thread(function, LocalStore(Path(folder)), *arguments)


def read_chunk(store: LocalStore, name: str, offset: int, inode: int | None) -> tuple[bytes, bool, int]:
    """Return (bytes from ``offset`` on, whether more follow, inode). Pass the inode of the previous call:
    FileNotFoundError is raised if the file was replaced since."""
    with open(store.folder / name, "rb") as file:
        found = os.fstat(file.fileno()).st_ino
        if inode not in (None, found):
            raise FileNotFoundError(f"{name} was replaced")
        file.seek(offset)
        content = file.read(CHUNK_BYTES)
        return content, bool(file.read(1)), found


def write_chunk(store: LocalStore, name: str, offset: int, content: bytes, last: bool) -> None:
    """Write ``content`` at ``offset``; with the ``last`` chunk the file gets its name."""
    target = store.folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(temporary_for(target), "r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(content)
    if last:
        commit(temporary_for(target), target)
