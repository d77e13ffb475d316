"""A real ``dask scheduler`` with ``dask worker`` processes, for tests to use and to kill."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.end_to_end.processes import Started, environment_of, started, wait_until

START_S = 120  # for a cluster or a run to start, on a busy machine
MARK = "HARNESS_TEST"


class Cluster:
    """A scheduler and ``num_workers`` single-threaded workers, on the loopback interface."""

    def __init__(self, folder: Path, num_workers: int, opened: ExitStack) -> None:
        from distributed import Client

        self.folder, self._opened = folder, opened
        self._file = folder / "scheduler.json"
        self.scheduler = self._start(
            "scheduler", "--port", "0", "--no-dashboard", "--no-show", "--scheduler-file", self._file
        )
        wait_until(self._file.exists, START_S, "the scheduler")
        self.workers = [self._worker(number) for number in range(num_workers)]
        self.client: Any = opened.enter_context(
            Client(scheduler_file=str(self._file), timeout=START_S, set_as_default=False)
        )
        self.client.wait_for_workers(num_workers, timeout=START_S)
        self.address = self.client.scheduler.address

    def _start(self, *words: Any) -> Started:
        command = [sys.executable, "-m", "dask", *words, "--host", "127.0.0.1"]
        name = f"{words[0]}-{len(list(self.folder.glob('*.txt')))}.txt"
        return self._opened.enter_context(started(command, self.folder / name))

    def _worker(self, number: int) -> Started:
        return self._start(
            "worker", "--scheduler-file", self._file, "--nthreads", "1", "--memory-limit", "0", "--no-dashboard",
            "--local-directory", self.folder / f"disk-{number}",
        )  # fmt: skip

    def pids(self) -> dict[str, int]:
        """Process id of each worker's own process, by address; its parent is the nanny."""
        return dict(self.client.run(os.getpid))

    def kill_worker(self, address: str) -> None:
        """SIGKILL a worker's nanny and its process."""
        pid = self.pids()[address]
        nanny = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for each in (nanny, pid):
            os.kill(each, signal.SIGKILL)


@contextmanager
def cluster(folder: Path, num_workers: int) -> Iterator[Cluster]:
    """A Cluster; none of its processes is left when the block ends."""
    with ExitStack() as opened:
        yield Cluster(folder, num_workers, opened)


def marked(mark: str) -> dict[int, dict[str, str]]:
    """{process id: environment} of the ranks that were started with launch.env={HARNESS_TEST: mark}."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {pid: environ for pid in pids if (environ := environment_of(pid)).get(MARK) == mark}


def ranks(mark: str) -> dict[int, int]:
    """Process ids by rank."""
    return {int(environ["RANK"]): pid for pid, environ in sorted(marked(mark).items(), reverse=True)}


class Running(threading.Thread):
    """``dask.run`` in a thread, so that a test can do things to it."""

    def __init__(self, client: Any, config: Any, *overrides: str) -> None:
        super().__init__(daemon=True)
        self._words, self.error, self.conclusion = (client, config, overrides), None, None
        self.start()

    def run(self) -> None:
        from harness.engines.dask import engine

        try:
            self.conclusion = engine.run(*self._words)
        except Exception as error:
            self.error = error

    def until(self, happened: Callable[[], Any], what: str) -> None:
        """Wait until ``happened()``; an error of the run ends it."""
        wait_until(lambda: happened() or not self.is_alive(), START_S, what)
        if self.error is not None:
            raise self.error

    def end(self, timeout_s: float) -> Any:
        """The RunOutcome, within ``timeout_s``."""
        self.join(timeout_s)
        assert not self.is_alive(), f"still running after {timeout_s} s"
        if self.error is not None:
            raise self.error
        return self.conclusion
