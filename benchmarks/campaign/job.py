"""One start of a run: its ranks, forked from this process or started by a launcher, until all of their processes end.

Forking costs a tenth of a second, where importing torch costs several: this process has imported everything that a rank
imports, and has started no thread.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.campaign import trigger
from benchmarks.campaign.trigger import Kill
from benchmarks.turns import free_port
from harness.cli import command, leave
from harness.distributed import processes

ROOT = Path(__file__).resolve().parents[2]
END_S = 30.0  # from the cause to the end of all processes
RUN_S = 600.0  # of a start that nothing kills
_POLL_S = 0.005


@dataclass
class End:
    """How a start ended. ``codes``: of each rank, or of the launcher alone; minus the signal of a killed process."""

    codes: list[int | None]
    fired: dict[str, Any] | None = None
    """What the killed rank reported: operation, rank, time; None if the run ended before it was killed."""
    counts: dict[int, dict[str, int]] = field(default_factory=dict)
    end_s: float = 0.0
    """From the cause to the end of the last process; without a cause, from the start."""
    hung: list[str] = field(default_factory=list)
    """Command lines of processes that were still running END_S after the cause."""

    @property
    def done(self) -> bool:
        return all(code == 0 for code in self.codes) and not self.hung


class Job:
    """``start`` starts the ranks of ``config``, a YAML file, with their terminal in ``folder``; ``wait`` ends them."""

    def __init__(self, config: Path, engine: str, world_size: int, kill: Kill | None) -> None:
        self._config, self._engine, self._world_size, self._kill = config, engine, world_size, kill
        self._folder = config.parent
        self._report, self._terminal = self._folder / "report.jsonl", self._folder / "terminal.txt"
        self._report.unlink(missing_ok=True)
        self._pids: list[int] = []
        self._codes: dict[int, int] = {}

    def run(self) -> End:
        """Start the ranks, and wait until every process has ended. No process is left when it returns."""
        processes.adopt_orphans()
        started = time.monotonic()
        # Loader workers have sockets there, whose paths must be short; a killed one leaves them.
        with tempfile.TemporaryDirectory(prefix="kill-", ignore_cleanup_errors=True) as self._temporary:
            try:
                if self._engine == "bare":
                    self._start_ranks()
                else:
                    self._start_launcher()
                return self._wait(started)
            finally:
                _kill_all()

    def _start_ranks(self) -> None:
        port = free_port()
        group = 0
        for rank in range(self._world_size):
            environ = {} if self._world_size == 1 else {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self._world_size),
                "LOCAL_WORLD_SIZE": str(self._world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip

            def body(rank: int = rank) -> None:
                torch.set_num_threads(1)  # replaces the thread pool, which torch cannot do once there are threads
                kill = asdict(self._kill) if self._kill else None
                trigger.arm(str(self._folder), str(self._report), rank, kill)
                command(["train", "-c", str(self._config)])

            self._pids.append(self._fork(body, environ, group))
            group = group or self._pids[0]

    def _start_launcher(self) -> None:
        environ = trigger.environment(str(self._folder), str(self._report), self._kill)
        self._pids.append(self._fork(lambda: leave(_launch(self._engine, self._config, self._world_size)), environ, 0))

    def _fork(self, body: Callable[[], None], environ: dict[str, str], group: int) -> int:
        """Run ``body`` in a new process of the process group ``group`` (0: a new one), which dies with this one."""
        sys.stdout.flush()
        bind = processes.terminated_with_parent()
        if pid := os.fork():
            with suppress(OSError):  # both do it: the next rank may join the group before this one has run
                os.setpgid(pid, group or pid)
            return pid
        try:
            with suppress(OSError):
                os.setpgid(0, group)
            if bind is not None:
                bind()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            terminal = os.open(self._terminal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (terminal, 1), (terminal, 2)):
                os.dup2(source, target)
            cache = str(self._folder.parent / "inductor")  # of torch.compile, which the starts of a chain share
            os.environ.update(environ | {"TMPDIR": self._temporary, "TORCHINDUCTOR_CACHE_DIR": cache})
            os.chdir(ROOT)
            multiprocessing.process.current_process()._config["authkey"] = b"campaign"  # type: ignore[attr-defined]
            body()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)

    def _wait(self, started: float) -> End:
        end = End([])
        cause, limit, waiting = started, started + RUN_S, True
        while waiting:
            waiting = self._reap()
            now = time.monotonic()
            if end.fired is None and (fired := self._fired()):
                end.fired, cause = fired, fired["time"]
                if self._kill is not None and (self._kill.then_s or self._kill.from_outside):
                    cause = self._send(self._kill, fired)
                limit = cause + END_S
            if waiting and now > limit:
                end.hung = self._ask_hung()
                _kill_all()
                break
            time.sleep(_POLL_S if waiting else 0)
        end.fired = end.fired or self._fired()
        if end.fired and cause == started:
            cause = end.fired["time"]
        end.end_s = max(0.0, time.monotonic() - cause)
        end.codes = [self._codes.get(pid) for pid in self._pids]
        end.counts = {line["rank"]: line["counts"] for line in self._reports() if "counts" in line}
        return end

    @staticmethod
    def _send(kill: Kill, fired: dict[str, Any]) -> float:
        """Send the signal from here, or kill what SIGSTOP has stopped; return the time at which that was."""
        number = signal.SIGKILL if kill.then_s else kill.signal
        time.sleep(max(0.0, fired["time"] + kill.then_s - time.monotonic()))
        with suppress(ProcessLookupError):
            if kill.target == "all ranks":
                os.killpg(os.getpgid(fired["pid"]), number)
            else:
                os.kill(fired["pid"], number)
        return time.monotonic()

    def _reap(self) -> bool:
        """Collect ended processes; False once none is left. Orphans become children of this process, and count."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                self._codes[pid] = os.waitstatus_to_exitcode(status)
        return False

    def _reports(self) -> Iterator[dict[str, Any]]:
        with suppress(FileNotFoundError):
            for line in self._report.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    yield json.loads(line)

    def _fired(self) -> dict[str, Any] | None:
        return next((line for line in self._reports() if "fired" in line), None) if self._kill else None

    def _ask_hung(self) -> list[str]:
        """The command lines of what still runs, after their stacks were written to the terminal file."""
        found = descendants(os.getpid())
        shown = [f"{pid}: {_command(pid)}" for pid in found]
        for number in (signal.SIGUSR2, signal.SIGCONT):  # registered by ``arm``; a rank that is stopped answers too
            for pid in found:
                if number == signal.SIGCONT or _handles(pid, number):
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
        time.sleep(1.0)
        return shown


def _launch(engine: str, config: Path, world_size: int) -> int:
    """Be the launcher ``engine`` for ``config``; return its exit code."""
    if engine == "harness launch":
        from harness.cli import main

        python = config.parent / "python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m benchmarks.campaign.rank "$@"\n')
        python.chmod(0o755)
        return main(["launch", "-c", str(config), "--engine", "local", "--nproc", str(world_size),
                     f"launch.python={python}"])  # fmt: skip
    from torch.distributed import launch, run

    words = ["--standalone", f"--nproc_per_node={world_size}", "-m", "benchmarks.campaign.rank", "-c", str(config)]
    (run if engine == "torchrun" else launch).main(words)
    return 0


def descendants(pid: int) -> list[int]:
    """The processes that ``pid`` started, and those that they started."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listed.read_text().split()):
                found += [child, *descendants(child)]
    return found


def _kill_all() -> None:
    """Kill every process below this one, and wait for their ends."""
    while left := descendants(os.getpid()):
        processes.send(signal.SIGKILL, left)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_S)


def _handles(pid: int, number: int) -> bool:
    """True if ``pid`` has a handler for the signal: the default action of SIGUSR2 is to kill."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)
        return bool(mask >> (number - 1) & 1)
    return False


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    return "?"
