"""The client's side of a run on a Dask cluster: places the ranks, starts them, follows them and stops them.

Each rank is a task (``worker.supervise``) that Dask places like any other and that occupies a thread of its worker.
Training starts once all of them run. ``RunFiles`` copies the run folder if no disk is shared.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from harness.config import loader
from harness.distributed.launch_env import Launch, environment
from harness.distributed.monitor import EngineReport, tell
from harness.distributed.rank_exit import RankExit
from harness.distributed.threads import Background, thread
from harness.distributed.worker_group import KILL_S, PEERS_S
from harness.engines.base import Job
from harness.engines.dask import worker as on_worker
from harness.engines.dask.run_files import RunFiles
from harness.errors import LaunchError, plural, reason, remedy
from harness.runs.exit_files import ExitFiles
from harness.runs.run_dir import RunFolder

BY = "harness launch, engine dask"
_PREFIX = "apex-harness-"
_FETCH_S = 2.0  # between two copies of what is new in a run folder elsewhere; more if a copy takes long
_LOOK_S = 1.0  # between two checks of which workers are alive
_ORPHAN_S = 15.0  # harness.distributed.watchdog ends a rank within 13 s of its worker's death
_POLL_S = 0.1
_EVENT = TypeAdapter(on_worker.TaskEvent)


@dataclass
class _Task:
    """The task of a rank, as the client knows it."""

    key: str
    future: Any = None
    place: on_worker.Place | None = None
    exit: int | None = None
    lost_at: float | None = None


class ClusterRun:
    """A run on a cluster, which ``start`` begins. ``follow`` and ``stop`` are called from two threads.

    Only ``start`` changes the list of tasks. The fields of a task are set by the thread of Dask's events (``_receive``)
    and by the one that waits, in ``start`` and then in ``follow``; what is set stays.
    """

    def __init__(self, client: Any, job: Job, closing: ExitStack) -> None:
        """``closing`` is closed at the end of the run."""
        self._client = client
        self._job = job
        self._closing = closing
        self._topic = f"{_PREFIX}{secrets.token_hex(4)}"
        self._where = str(client.scheduler.address)
        self._tasks: list[_Task] = []  # by rank, once all have a place
        self._why_lost = ""
        self._stop_requested = False
        self._stops_sent = 0  # to the peers of a failed rank; the first one is gentle
        self._failed_at: float | None = None
        self._looked_at = 0.0
        self._folder = RunFolder(job.folder, job.config.checkpoint.keep)
        self._exit_files = ExitFiles(self._folder.path)
        self._files: RunFiles | None = None
        self._ended = threading.Event()

    # Starting

    @classmethod
    def start(cls, client: Any, job: Job, closing: ExitStack) -> ClusterRun:
        """Place all ranks on the cluster of ``client`` and start them, which may take minutes. Raises LaunchError with
        nothing left on the cluster."""
        run = cls(client, job, closing)
        try:
            run._start_ranks(shared=run._place())
        except BaseException as error:
            run._clear()
            if isinstance(error, OSError):  # of the connection to the cluster
                raise LaunchError(f"the ranks could not be placed: {reason(error)}", where=run._where) from None
            raise
        return run

    def _place(self) -> bool:
        """Wait until every rank's task runs, and number them. True if all workers share this machine's disk."""
        settings, count = self._job.settings.engine_settings, self._job.world_size
        deadline = time.monotonic() + settings.timeout_s
        self._client.subscribe_topic(self._topic, self._receive)
        with _marker(self._job) as marker:
            for number in range(count):
                task = _Task(f"{self._topic}-{number}")
                self._tasks.append(task)  # before its first event
                task.future = self._client.submit(
                    on_worker.supervise, self._topic, marker, key=task.key, pure=False, retries=0,
                    resources=settings.resources or None,
                )  # fmt: skip
            while len(self._places) < count:
                self._check_tasks()
                if self._why_lost:
                    raise LaunchError(f"the ranks could not be placed: {self._why_lost}", where=self._where)
                if time.monotonic() > deadline:
                    raise self._too_few(settings.resources, settings.timeout_s)
                time.sleep(_POLL_S / 2)
        # A new list: one that is being sorted is empty to _receive.
        self._tasks = sorted(self._tasks, key=_order)
        return all(place.sees_marker for place in self._places)

    def _too_few(self, resources: dict[str, float], waited_s: float) -> LaunchError:
        threads, busy = self._client.nthreads(), self._client.processing()
        others = {at: sum(not str(key).startswith(self._topic) for key in keys) for at, keys in busy.items()}
        lines = [
            f"\n  {at}: {plural(number, 'thread')}, {plural(others.get(at, 0), 'other task')}"
            for at, number in sorted(threads.items())
        ]
        asked = f" and resources {resources}" if resources else ""
        return LaunchError(
            f"{len(self._places)} of {plural(len(self._tasks), 'rank')} found a worker with a free thread{asked} "
            f"within {waited_s:g} s; the workers:{''.join(lines) or ' none'}",
            where=self._where,
            hint="start more workers (dask worker ADDRESS --nthreads 1), or request fewer ranks (--nproc N)",
        )

    def _start_ranks(self, shared: bool) -> None:
        job, places = self._job, self._places
        if copied := not shared and not job.url:
            self._send_files(places)
        groups = [(place.host, place.devices) for place in places]  # ranks that see the same devices share them
        sizes, placed = Counter(groups), Counter[Any]()
        for rank, (task, place, group) in enumerate(zip(self._tasks, places, groups, strict=True)):
            launch = Launch(
                rank=rank,
                local_rank=placed[group],
                world_size=len(groups),
                local_world_size=sizes[group],
                master_addr=_host_of(places[0].worker),
                master_port=places[0].port,
                by=BY,
                supervised=True,
            )
            placed[group] += 1
            overrides = []
            if copied:
                overrides = [f"output={place.scratch}/output"]
            elif not job.url:
                overrides = [f"output={Path(job.config.output).absolute()}"]
            start = on_worker.RankJob(
                rank=rank,
                environ=job.environ() | environment(launch),
                config=loader.to_text(job.config),
                overrides=tuple(overrides),
                working_folder=os.getcwd() if shared else "",
                python=job.settings.python,
                grace_s=job.settings.grace_s,
            )
            print(f"rank {rank}: worker {place.worker} on {place.host}", file=sys.stderr)
            self._client.run(on_worker.tell, task.future.key, start, workers=[place.worker])

    def _send_files(self, places: list[on_worker.Place]) -> None:
        """Claim the run folder on this machine, as rank 0 does on a shared disk, and send its files to the workers."""
        self._folder.lock()  # the results of two starts must not mix
        if note := self._folder.claim(self._job.config):
            print(note, file=sys.stderr)
        scratch = {place.worker: place.scratch for place in places}
        ranks = {worker: [rank for rank, at in enumerate(places) if at.worker == worker] for worker in scratch}
        folders = {worker: f"{folder}/output/{self._job.config.name}" for worker, folder in scratch.items()}
        self._files = RunFiles(self._client, self._folder.checkpoints, folders, ranks)
        try:
            self._files.send()
        except OSError as error:
            raise LaunchError(f"the run could not be sent to the workers: {error}", where=self._where) from None

    # Following

    def follow(self) -> EngineReport:
        """Wait until every rank has ended, or is lost, and its files are on this machine; leave nothing on the cluster.
        Returns the exits that this client has seen."""
        copy = Background(self._copy, "harness-fetch")
        copy_error: Exception | None = None
        try:
            while any(self._is_running(rank) for rank in range(len(self._tasks))):
                self._check_tasks()
                self._check_workers()
                self._end_peers()
                time.sleep(_POLL_S)
        finally:
            self._ended.set()
            try:
                copy_error = copy.result()  # of the last copy, after which nothing is needed on the workers
            except Exception as error:
                copy_error = error
            self._clear(keep=copy_error is not None)
        if copy_error:
            self._why_lost = self._why_lost or f"the results could not be copied from the workers: {copy_error}"
        exits = [RankExit.from_code(rank, task.exit) for rank, task in enumerate(self._tasks) if task.exit is not None]
        if self._why_lost:
            lost = [rank for rank, task in enumerate(self._tasks) if task.lost_at is not None]
            exits.append(RankExit.lost(self._why_lost, next(iter(lost), None)))
        return EngineReport(exits, self._stop_requested)

    def stop(self) -> None:
        """Let all ranks write a checkpoint and exit; the second call kills them."""
        self._stop_requested = True
        self._stop_ranks()

    def _stop_ranks(self) -> None:
        """Stop all ranks, in a thread: the calls may take long."""

        def run() -> None:
            alive = self._alive()
            for task in self._tasks:
                if task.place and task.place.worker in alive:
                    with suppress(Exception):  # unreachable workers are gone, or their futures will report it
                        words = (task.future.key, on_worker.STOP)
                        self._client.run(on_worker.tell, *words, workers=[task.place.worker])

        thread(run, "harness-stop").start()

    def _is_running(self, rank: int) -> bool:
        task = self._tasks[rank]
        if task.exit is not None or task.lost_at is None:
            return task.exit is None
        if self._files is None and rank in self._exit_files.read():
            return False
        return time.monotonic() < task.lost_at + _ORPHAN_S

    def _lose(self, tasks: Iterable[_Task], why: str) -> None:
        for task in tasks:
            if task.exit is None and task.lost_at is None:
                task.lost_at = time.monotonic()
                self._why_lost = self._why_lost or why

    def _check_tasks(self) -> None:
        if self._client.status != "running":  # the client drops its futures together with the connection
            self._lose(self._tasks, f"the scheduler {self._where} is gone")
        for task in self._tasks:
            if task.exit is not None or task.lost_at is not None or task.future.status == "pending":
                continue
            if task.future.status == "error":
                error = task.future.exception()
                hint = ": install the project, with its dask extra, there" if isinstance(error, ImportError) else ""
                self._lose([task], f"{error}{hint}")
            elif task.future.status != "finished":
                self._lose([task], "the task of a rank was canceled")
            else:  # usually its event came first; this is for an event that was lost
                with suppress(OSError, asyncio.TimeoutError):  # Dask's, which on Python 3.10 is no TimeoutError
                    task.exit = task.future.result(timeout=5)

    def _check_workers(self) -> None:
        if time.monotonic() < self._looked_at + _LOOK_S or self._client.status != "running":
            return
        self._looked_at = time.monotonic()
        with suppress(OSError, asyncio.TimeoutError, RuntimeError):  # the client's status shows it at the next check
            alive = self._alive()
            for task in self._tasks:
                if task.place and task.place.worker not in alive:
                    self._lose([task], f"worker {task.place.worker} on {task.place.host} is gone")

    def _end_peers(self) -> None:
        """After a rank has failed, let the others end by themselves for a while; then stop them, then kill them."""
        if not any(task.exit or task.lost_at for task in self._tasks):
            return
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() - self._failed_at > PEERS_S + KILL_S * self._stops_sent and self._stops_sent < 2:
            self._stops_sent += 1
            self._stop_ranks()

    def _receive(self, message: tuple[float, dict[str, Any]]) -> None:
        event = _EVENT.validate_python(message[1])
        task = next(task for task in self._tasks if task.key == event.key)
        if event.place and task.place:  # Dask repeats a task whose worker died. One rank without its peers is useless.
            self._lose([task], f"worker {task.place.worker} on {task.place.host} has restarted")
        task.place = task.place or event.place
        if event.exit is not None:
            task.exit = event.exit
        if event.lines:
            tell("\n".join(event.lines))

    def _copy(self) -> Exception | None:
        """Copy what is new to this machine until the run has ended, and once more; return the last copy's error."""
        pause_s, ended, warned = _FETCH_S, False, False
        last_error: Exception | None = None
        while self._files is not None and not ended:
            ended = self._ended.wait(pause_s)
            begun, last_error = time.monotonic(), None
            try:
                alive = self._alive()
                self._files.fetch([worker for worker in self._workers if worker in alive])
                gone = [worker for worker in self._workers if worker not in alive]
                if ended and gone and not self._why_lost:
                    raise ConnectionError(f"worker {gone[0]} is gone")
            except Exception as error:  # a worker went away, or this machine's disk is full
                last_error = error
                if not (warned or ended):
                    tell(f"warning: the results cannot be copied from the workers now: {error}; it will be tried again")
                warned = True
            pause_s = max(_FETCH_S, 10 * (time.monotonic() - begun))
        return last_error

    # The cluster

    @property
    def _places(self) -> list[on_worker.Place]:
        return [task.place for task in self._tasks if task.place is not None]

    @property
    def _workers(self) -> list[str]:
        return list(dict.fromkeys(place.worker for place in self._places))

    def _alive(self) -> list[str]:
        if self._client.status != "running":
            return []  # asking would block for half a minute
        return list(self._client.nthreads(self._workers))

    def _clear(self, keep: bool = False) -> None:
        """Leave nothing of this run on the cluster, and other people's work alone. ``keep``: leave its files on the
        workers, since this machine may not have them."""
        with suppress(Exception):  # the cluster may be gone
            if self._client.status == "running":
                self._client.cancel([task.future for task in self._tasks if task.future is not None])
                self._client.unsubscribe_topic(self._topic)
                alive = self._alive()
                for worker, scratch in {(place.worker, place.scratch) for place in self._places}:
                    if worker in alive and keep:
                        tell(f"the results on worker {worker} are kept there, in {scratch}")
                    elif worker in alive:
                        self._client.run(on_worker.forget, scratch, workers=[worker], on_error="ignore")
        self._folder.unlock()
        self._closing.close()


def _order(task: _Task) -> tuple[str, ...]:
    """Return a sort key by which the ranks of a machine follow each other."""
    return (task.place.host, task.place.worker, task.key) if task.place else ()


def _host_of(address: str) -> str:
    from distributed.comm.addressing import get_address_host

    return str(get_address_host(address))


@contextmanager
def _marker(job: Job) -> Iterator[str]:
    """A file in the output folder (the current one if the output is a URL): workers that share the disk see it."""
    output = "." if job.url else job.config.output
    with ExitStack() as stack:
        try:
            Path(output).mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(tempfile.NamedTemporaryFile(dir=output, prefix=f".{_PREFIX}"))
        except OSError as error:
            raise LaunchError(f"a file cannot be written: {reason(error)}", where=output, hint=remedy(error)) from None
        yield str(Path(file.name).absolute())
