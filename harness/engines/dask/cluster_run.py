"""A gang of ranks on the workers of a Dask cluster, as its client sees it: placed, begun, followed, stopped.

Which workers have room is the business of ``dask_places``, what happens on one that of ``dask_rank``, and files that go
back and forth where there is no disk in common that of ``dask_home``.
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
from harness.distributed.monitor import Outcome
from harness.distributed.worker_group import KILL_S, PEERS_S
from harness.engines.base import Job
from harness.engines.dask import placement
from harness.engines.dask import worker as dask_rank
from harness.engines.dask.file_sync import FOREIGN, Home
from harness.engines.dask.placement import Seat, ask
from harness.engines.dask.reservation import KEYS
from harness.errors import LaunchError
from harness.runs import layout, rank_exit
from harness.runs.run_dir import RunFolder

BY = "harness launch, engine dask"
_FETCH_S = 2.0  # between two looks at what is new in a run folder elsewhere
_LOOK_S = 1.0  # between two looks at which workers are there
_ORPHAN_S = 15.0  # harness.distributed.watchdog ends a rank within 13 s of its worker's death
_POLL_S = 0.1

News = dict[str, Any]  # an event: {"rank": 0, and here=HOST, or file=NAME with lines=[…], or exit=CODE}


class Placed:
    """A run on a cluster. ``follow`` and ``stop`` are called from two threads."""

    def __init__(self, client: Any, job: Job, hear: Callable[[News], None] | None, closing: ExitStack) -> None:
        """Place all ranks and begin, or raise LaunchError with nothing left behind. ``closing`` is closed when the run
        is over; ``hear`` is called with every event, in a thread of the client."""
        self._client, self._job, self._hear, self._closing = client, job, hear, closing
        self._name = secrets.token_hex(4)
        self._asked, self._pushed = 0, 0
        self._failed_at: float | None = None
        self._here: set[int] = set()
        self._exits: dict[int, int] = {}
        self._lost: dict[int, float] = {}  # when ranks went away with their workers
        self._why_lost = ""
        self._looked, self._fetched = 0.0, 0.0
        self._futures: dict[int, Any] = {}
        self._seats: list[Seat] = []
        self._folder = RunFolder(job.folder)
        self._earlier = rank_exit.read(self._folder.logs)
        self._home: Home | None = None
        self._copying = ThreadPoolExecutor(1, "harness-home")
        self._copy: Future[None] | None = None
        try:
            self._start()
        except BaseException:
            self._clear()
            raise

    # Placing

    def _start(self) -> None:
        deadline = time.monotonic() + self._job.settings.dask.timeout_s
        self._seats, shared = placement.find(self._client, self._job, self._name, deadline)
        ask(self._client, dask_rank.prepare, self._order(shared), workers=self._workers)
        self._client.subscribe_topic(f"{KEYS}{self._name}", self._on_event)
        first = self._seats[0].worker
        self._submit(ask(self._client, dask_rank.hold_port, self._name, workers=[first])[first])
        self._wait_for_all(deadline)
        if self._home is not None:
            self._send(self._home)
        ask(self._client, dask_rank.begin, self._name, workers=self._workers)

    def _wait_for_all(self, deadline: float) -> None:
        """Until each rank's task runs: a worker may have been given other work just now."""
        while len(self._here) < len(self._seats):
            self._look_at_futures()
            if self._why_lost:
                raise LaunchError(f"the ranks could not be placed: {self._why_lost}", where=self._scheduler)
            if time.monotonic() > deadline:
                late = sorted({seat.worker for rank, seat in enumerate(self._seats) if rank not in self._here})
                raise LaunchError(
                    f"of {len(self._seats)} ranks {len(self._here)} could be placed: {', '.join(late)} took other work",
                    where=self._scheduler, hint="wait for it, or raise launch.dask.timeout_s",
                )  # fmt: skip
            time.sleep(_POLL_S / 2)

    def _order(self, shared: bool) -> dask_rank.Order:
        job, settings = self._job, self._job.settings.dask
        working = settings.working_folder or (os.getcwd() if shared else "")
        words, run_folder = [], str(job.folder.absolute())
        if not shared and not job.url:
            words, run_folder = ["output={scratch}/output"], f"{{scratch}}/output/{job.config.name}"
            words += [f"checkpoint.resume={{scratch}}/{FOREIGN}"] if self._foreign() else []
            ranks = {worker: [r for r, s in enumerate(self._seats) if s.worker == worker] for worker in self._workers}
            self._home = Home(self._client, self._name, job.folder, job.config.checkpoint.keep, ranks)
        elif settings.working_folder and not job.url:
            words = [f"output={Path(job.config.output).absolute()}"]
        return dask_rank.Order(
            self._name, loader.to_text(job.config), tuple(words), run_folder, job.url, job.config.data.cache_dir,
            working, job.settings.python, job.settings.grace_s,
        )  # fmt: skip

    def _foreign(self) -> Path | None:
        """The checkpoint of another run that checkpoint.resume names, where it is here."""
        resume = self._job.config.checkpoint.resume
        return Path(resume) if resume not in ("auto", "never") and Path(resume).is_dir() else None

    def _send(self, home: Home) -> None:
        """Go on with the run folder here, or move it aside, as a rank would; then send out what it has."""
        self._folder.lock()  # there is room for the results of one start alone
        if told := self._folder.claim(self._job.config):
            print(told, file=sys.stderr)
        try:
            home.send(self._foreign())
        except OSError as error:
            raise LaunchError(f"the run could not be sent to the workers: {error}", where=self._scheduler) from None

    def _submit(self, port: int) -> None:
        from distributed.comm.addressing import get_address_host

        master = get_address_host(self._seats[0].worker)
        groups = [(seat.host, seat.devices) for seat in self._seats]  # who sees the same devices shares them out
        sizes, begun = Counter(groups), Counter[Any]()
        for rank, (seat, group) in enumerate(zip(self._seats, groups, strict=True)):
            launch = Launch(rank, begun[group], len(groups), sizes[group], master, port, BY, supervised=True)
            begun[group] += 1
            files = [f"{layout.LOGS}/{layout.rank_log(rank)}", *([layout.METRICS] if rank == 0 else [])]
            self._futures[rank] = self._client.submit(
                dask_rank.supervise, self._name, rank, self._job.environ() | environment(launch), files,
                key=f"{KEYS}{self._name}-rank-{rank}", pure=False, workers=[seat.worker],
                allow_other_workers=False, resources=seat.takes or None, retries=0,
            )  # fmt: skip
            print(f"rank {rank}: worker {seat.worker} on {seat.host}", file=sys.stderr)

    # Following

    def follow(self) -> Outcome:
        try:
            while any(self._is_running(rank) for rank in range(len(self._seats))):
                self._look_at_futures()
                self._look_at_workers()
                self._end_peers()
                self._fetch()
                time.sleep(_POLL_S)
            self._fetch_the_rest()
        finally:
            self._clear()
        return Outcome(self._exits, self._why_lost, bool(self._asked), lost_rank=next(iter(self._lost), None))

    def stop(self) -> None:
        self._asked += 1
        self._push()

    def _push(self) -> None:
        """Signal all ranks, in a thread: the answer may take long."""

        def tell() -> None:
            with suppress(Exception):  # who cannot be told is gone, or its future will say so
                self._client.run(dask_rank.stop, self._name, workers=self._alive(), on_error="ignore")

        threading.Thread(target=tell, name="harness-stop", daemon=True).start()

    def _is_running(self, rank: int) -> bool:
        if rank in self._exits:
            return False
        if rank not in self._lost:
            return True
        if self._home is None and rank in rank_exit.since(self._earlier, self._folder.logs):
            return False
        return time.monotonic() < self._lost[rank] + _ORPHAN_S

    def _lose(self, ranks: Sequence[int], why: str) -> None:
        for rank in ranks:
            if rank not in self._exits and rank not in self._lost:
                self._lost[rank] = time.monotonic()
                self._why_lost = self._why_lost or why

    def _look_at_futures(self) -> None:
        if self._client.status != "running":  # it gives up its futures with the connection
            self._lose(range(len(self._seats)), f"the scheduler {self._scheduler} is gone")
        for rank, future in self._futures.items():
            if rank in self._exits or rank in self._lost or future.status == "pending":
                continue
            if future.status == "error":
                self._lose([rank], str(future.exception()))
            elif future.status != "finished":
                self._lose([rank], f"the task of rank {rank} was cancelled")
            else:  # its event, which comes first, tells the exit code; this is for one that was lost
                with suppress(OSError, TimeoutError):
                    self._exits[rank] = future.result(timeout=5)

    def _look_at_workers(self) -> None:
        if time.monotonic() < self._looked + _LOOK_S or self._client.status != "running":
            return
        self._looked = time.monotonic()
        with suppress(OSError, TimeoutError, RuntimeError):  # the client's status tells, by the next look
            for worker in sorted(set(self._workers) - set(self._alive())):
                lost = [rank for rank, seat in enumerate(self._seats) if seat.worker == worker]
                self._lose(lost, f"worker {worker} on {self._seats[lost[0]].host} is gone")

    def _end_peers(self) -> None:
        """Once a rank has failed the others get a moment to end by themselves."""
        if not self._lost and not any(self._exits.values()):
            return
        self._failed_at = self._failed_at or time.monotonic()
        over = time.monotonic() - self._failed_at
        if over > PEERS_S + KILL_S * self._pushed and self._pushed < 2:
            self._pushed += 1
            self._push()

    def _on_event(self, event: tuple[float, News]) -> None:
        news = event[1]
        if "here" in news:
            self._here.add(news["rank"])
        if "exit" in news:
            self._exits[news["rank"]] = news["exit"]
        if news.get("file") == "terminal":
            print("\n".join(news["lines"]), file=sys.stderr)
        if self._hear is not None:
            self._hear(news)

    # Home

    def _fetch(self) -> None:
        """Begin to bring home what is new, unless that is under way."""
        due = time.monotonic() > self._fetched + _FETCH_S
        if self._home is not None and due and (self._copy is None or self._copy.done()):
            self._fetched = time.monotonic()
            self._copy = self._copying.submit(self._bring_home)

    def _bring_home(self) -> None:
        assert self._home is not None
        alive = self._alive()
        self._home.fetch([worker for worker in self._workers if worker in alive])

    def _fetch_the_rest(self) -> None:
        if self._home is None:
            return
        if self._copy is not None:
            self._copy.exception()  # what failed on the way is tried once more
        try:
            self._bring_home()
        except OSError as error:
            self._why_lost = self._why_lost or f"the results could not be brought home: {error}"

    # The cluster

    @property
    def _workers(self) -> list[str]:
        return list(dict.fromkeys(seat.worker for seat in self._seats))

    @property
    def _scheduler(self) -> str:
        return str(self._client.scheduler.address)

    def _alive(self) -> list[str]:
        if self._client.status != "running":
            return []  # to ask would be to wait for half a minute
        return list(self._client.nthreads(self._workers))

    def _clear(self) -> None:
        """Leave nothing of this run on the cluster; what else runs there is left alone."""
        with suppress(Exception):  # of a cluster that is gone
            if self._client.status == "running":
                self._client.cancel(list(self._futures.values()))
                self._client.unsubscribe_topic(f"{KEYS}{self._name}")
                placement.release(self._client, self._name)
                self._client.run(dask_rank.forget, self._name, workers=self._alive(), on_error="ignore")
        self._copying.shutdown(wait=False, cancel_futures=True)
        self._folder.unlock()
        self._closing.close()
