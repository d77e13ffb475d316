"""The client's side of a run on a Dask cluster: places the ranks, starts them, follows them and stops them.

``placement`` finds the workers, ``worker`` runs on them, and ``file_sync`` copies files if no disk is shared.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from harness.config import loader
from harness.distributed.launch_env import Launch, environment
from harness.distributed.monitor import EngineReport
from harness.distributed.rank_exit import RankExit
from harness.distributed.worker_group import KILL_S, PEERS_S
from harness.engines.base import Job
from harness.engines.dask import placement
from harness.engines.dask import worker as on_worker
from harness.engines.dask.file_sync import BORROWED, FileSync
from harness.engines.dask.placement import Placement
from harness.engines.dask.reservation import KEYS
from harness.errors import LaunchError
from harness.runs import layout
from harness.runs.exit_files import ExitFiles
from harness.runs.run_dir import RunFolder

BY = "harness launch, engine dask"
_FETCH_S = 2.0  # between two copies of what is new in a run folder elsewhere
_LOOK_S = 1.0  # between two checks of which workers are alive
_ORPHAN_S = 15.0  # harness.distributed.watchdog ends a rank within 13 s of its worker's death
_POLL_S = 0.1

Event = dict[str, Any]  # {"rank": 0, and here=HOST, or file=NAME with lines=[…], or exit=CODE}


class ClusterRun:
    """A run on a cluster. ``follow`` and ``stop`` are called from two threads."""

    def __init__(self, client: Any, job: Job, on_event: Callable[[Event], None] | None, closing: ExitStack) -> None:
        """Place all ranks and start them, or raise LaunchError with nothing left on the cluster.

        ``on_event`` is called with every event, in a thread of the client; ``closing`` is closed at the end of the run.
        """
        self._client, self._job, self._on_event, self._closing = client, job, on_event, closing
        self._name = secrets.token_hex(4)
        self._placements: list[Placement] = []
        self._futures: dict[int, Any] = {}
        self._ready: set[int] = set()  # ranks whose task waits on its worker
        self._exits: dict[int, int] = {}
        self._lost: dict[int, float] = {}  # when ranks went away with their workers
        self._why_lost = ""
        self._stops, self._kills = 0, 0
        self._failed_at: float | None = None
        self._looked_at, self._fetched_at = 0.0, 0.0
        self._folder = RunFolder(job.folder, job.config.checkpoint.keep)
        self._exit_files = ExitFiles(self._folder.logs)
        self._files: FileSync | None = None
        self._copier = ThreadPoolExecutor(1, "harness-fetch")
        self._copy: Future[None] | None = None
        try:
            self._start()
        except BaseException:
            self._clear()
            raise

    # Starting

    def _start(self) -> None:
        deadline = time.monotonic() + self._job.settings.engine_settings.timeout_s
        self._placements, shared = placement.find(self._client, self._job, self._name, deadline)
        placement.call(self._client, on_worker.prepare, self._spec(shared), workers=self._workers)
        self._client.subscribe_topic(f"{KEYS}{self._name}", self._receive)
        first = self._placements[0].worker
        port = placement.call(self._client, on_worker.hold_port, self._name, workers=[first])[first]
        self._submit(port)
        self._wait_for_tasks(deadline)
        if self._files is not None:
            self._send_files(self._files)
        placement.call(self._client, on_worker.begin, self._name, workers=self._workers)

    def _spec(self, shared: bool) -> on_worker.JobSpec:
        job, settings = self._job, self._job.settings.engine_settings
        working = settings.working_folder or (os.getcwd() if shared else "")
        overrides, run_folder = [], str(job.folder.absolute())
        if not shared and not job.url:
            overrides, run_folder = ["output={scratch}/output"], f"{{scratch}}/output/{job.config.name}"
            overrides += [f"checkpoint.resume={{scratch}}/{BORROWED}"] if self._borrowed() else []
            ranks = {worker: self._ranks_of(worker) for worker in self._workers}
            self._files = FileSync(self._client, self._name, self._folder.checkpoints, ranks)
        elif settings.working_folder and not job.url:
            overrides = [f"output={Path(job.config.output).absolute()}"]
        return on_worker.JobSpec(
            self._name, loader.to_text(job.config), tuple(overrides), run_folder, job.url, job.config.data.cache_dir,
            working, job.settings.python, job.settings.grace_s,
        )  # fmt: skip

    def _borrowed(self) -> Path | None:
        """The checkpoint of another run that checkpoint.resume names, if it is on this machine."""
        named = self._job.config.checkpoint.named
        return Path(named) if named and Path(named).is_dir() else None

    def _submit(self, port: int) -> None:
        from distributed.comm.addressing import get_address_host

        master = get_address_host(self._placements[0].worker)
        groups = [(each.host, each.devices) for each in self._placements]  # ranks that see the same devices share them
        sizes, placed = Counter(groups), Counter[Any]()
        for rank, (each, group) in enumerate(zip(self._placements, groups, strict=True)):
            launch = Launch(rank, placed[group], len(groups), sizes[group], master, port, BY, supervised=True)
            placed[group] += 1
            files = [f"{layout.LOGS}/{layout.rank_log(rank)}", *([] if rank else [layout.METRICS])]
            self._futures[rank] = self._client.submit(
                on_worker.supervise, self._name, rank, self._job.environ() | environment(launch), files,
                key=f"{KEYS}{self._name}-rank-{rank}", pure=False, workers=[each.worker],
                allow_other_workers=False, resources=each.takes or None, retries=0,
            )  # fmt: skip
            print(f"rank {rank}: worker {each.worker} on {each.host}", file=sys.stderr)

    def _wait_for_tasks(self, deadline: float) -> None:
        """Wait until each rank's task runs: a worker may have been given other work just now."""
        while len(self._ready) < len(self._placements):
            self._check_futures()
            if self._why_lost:
                raise LaunchError(f"the ranks could not be placed: {self._why_lost}", where=self._scheduler)
            if time.monotonic() > deadline:
                late = sorted({each.worker for rank, each in enumerate(self._placements) if rank not in self._ready})
                raise LaunchError(
                    f"only {len(self._ready)} of {len(self._placements)} ranks could be placed: {', '.join(late)} "
                    "started other work",
                    where=self._scheduler,
                    hint="wait for it, or raise launch.dask.timeout_s",
                )
            time.sleep(_POLL_S / 2)

    def _send_files(self, files: FileSync) -> None:
        """Claim the run folder on this machine, as rank 0 does on a shared disk, and send its files to the workers."""
        self._folder.lock()  # the results of two starts must not mix
        if note := self._folder.claim(self._job.config):
            print(note, file=sys.stderr)
        try:
            files.send(self._borrowed())
        except OSError as error:
            raise LaunchError(f"the run could not be sent to the workers: {error}", where=self._scheduler) from None

    # Following

    def follow(self) -> EngineReport:
        try:
            while any(self._is_running(rank) for rank in range(len(self._placements))):
                self._check_futures()
                self._check_workers()
                self._end_peers()
                self._fetch_soon()
                time.sleep(_POLL_S)
            self._fetch_rest()
        finally:
            self._clear()
        exits = [RankExit.from_code(rank, code) for rank, code in self._exits.items()]
        if self._why_lost:
            exits.append(RankExit.lost(self._why_lost, next(iter(self._lost), None)))
        return EngineReport(exits, bool(self._stops))

    def stop(self) -> None:
        self._stops += 1
        self._stop_ranks()

    def _stop_ranks(self) -> None:
        """Stop all ranks, in a thread: the call may take long."""

        def run() -> None:
            with suppress(Exception):  # unreachable workers are gone, or their futures will report it
                self._client.run(on_worker.stop, self._name, workers=self._alive(), on_error="ignore")

        threading.Thread(target=run, name="harness-stop", daemon=True).start()

    def _is_running(self, rank: int) -> bool:
        if rank in self._exits:
            return False
        if rank not in self._lost:
            return True
        if self._files is None and rank in self._exit_files.read():
            return False
        return time.monotonic() < self._lost[rank] + _ORPHAN_S

    def _lose(self, ranks: Sequence[int], why: str) -> None:
        for rank in ranks:
            if rank not in self._exits and rank not in self._lost:
                self._lost[rank] = time.monotonic()
                self._why_lost = self._why_lost or why

    def _check_futures(self) -> None:
        if self._client.status != "running":  # the client drops its futures together with the connection
            self._lose(range(len(self._placements)), f"the scheduler {self._scheduler} is gone")
        for rank, future in self._futures.items():
            if rank in self._exits or rank in self._lost or future.status == "pending":
                continue
            if future.status == "error":
                self._lose([rank], str(future.exception()))
            elif future.status != "finished":
                self._lose([rank], f"the task of rank {rank} was canceled")
            else:  # usually its event came first; this is for an event that was lost
                with suppress(OSError, TimeoutError):
                    self._exits[rank] = future.result(timeout=5)

    def _check_workers(self) -> None:
        if time.monotonic() < self._looked_at + _LOOK_S or self._client.status != "running":
            return
        self._looked_at = time.monotonic()
        with suppress(OSError, TimeoutError, RuntimeError):  # the client's status shows it at the next check
            for worker in sorted(set(self._workers) - set(self._alive())):
                lost = self._ranks_of(worker)
                self._lose(lost, f"worker {worker} on {self._placements[lost[0]].host} is gone")

    def _end_peers(self) -> None:
        """After a rank has failed, let the others end by themselves for a while; then stop them, then kill them."""
        if not self._lost and not any(self._exits.values()):
            return
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() - self._failed_at > PEERS_S + KILL_S * self._kills and self._kills < 2:
            self._kills += 1
            self._stop_ranks()

    def _receive(self, message: tuple[float, Event]) -> None:
        event = message[1]
        if "here" in event:
            self._ready.add(event["rank"])
        if "exit" in event:
            self._exits[event["rank"]] = event["exit"]
        if event.get("file") == "terminal":
            print("\n".join(event["lines"]), file=sys.stderr)
        if self._on_event is not None:
            self._on_event(event)

    # Fetching files

    def _fetch_soon(self) -> None:
        """Start to copy what is new to this machine, unless a copy is under way."""
        due = time.monotonic() > self._fetched_at + _FETCH_S
        if self._files is not None and due and (self._copy is None or self._copy.done()):
            self._fetched_at = time.monotonic()
            self._copy = self._copier.submit(self._fetch)

    def _fetch(self) -> None:
        assert self._files is not None
        alive = self._alive()
        self._files.fetch([worker for worker in self._workers if worker in alive])

    def _fetch_rest(self) -> None:
        if self._files is None:
            return
        if self._copy is not None:
            self._copy.exception()  # whatever it is, the copy is tried once more
        try:
            self._fetch()
        except OSError as error:
            self._why_lost = self._why_lost or f"the results could not be copied from the workers: {error}"

    # The cluster

    @property
    def _workers(self) -> list[str]:
        return list(dict.fromkeys(each.worker for each in self._placements))

    def _ranks_of(self, worker: str) -> list[int]:
        return [rank for rank, each in enumerate(self._placements) if each.worker == worker]

    @property
    def _scheduler(self) -> str:
        return str(self._client.scheduler.address)

    def _alive(self) -> list[str]:
        if self._client.status != "running":
            return []  # asking would block for half a minute
        return list(self._client.nthreads(self._workers))

    def _clear(self) -> None:
        """Leave nothing of this run on the cluster, and other people's work alone."""
        with suppress(Exception):  # the cluster may be gone
            if self._client.status == "running":
                self._client.cancel(list(self._futures.values()))
                self._client.unsubscribe_topic(f"{KEYS}{self._name}")
                placement.release(self._client, self._name)
                self._client.run(on_worker.forget, self._name, workers=self._alive(), on_error="ignore")
        self._copier.shutdown(wait=False, cancel_futures=True)
        self._folder.unlock()
        self._closing.close()
