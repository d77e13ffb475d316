"""One start of a run: its ranks, forked from this process or started by a launcher, until all of their processes end.

The recorder of ``harness verify-resume`` notes where a start can be killed, and kills it. Forking costs a tenth of a
second, where importing torch costs several: this process has imported everything that a rank imports, and has started
no thread.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.turns import free_port
from harness.audit import saved_files
from harness.audit.plan import PLAN, AuditPlan, HowKilled, PlannedKill
from harness.audit.process_family import ProcessFamily
from harness.audit.starts import HOOK, Watch, record_this_process
from harness.cli import command
from harness.distributed import processes
from harness.distributed.streams import leave
from harness.runs.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
END_S = 30.0  # from the kill to the end of all processes
RUN_S = 600.0  # of a start that nothing kills
_STACKS_S = 1.0  # for a rank that hangs to print where it is
_POLL_S = 0.005


@dataclass
class End:
    """How a start ended. ``codes``: of each rank, or of the launcher alone; minus the signal of a killed process; none
    if all were killed."""

    codes: list[int]
    killed: dict[str, Any] | None
    """The mark of the recorder, with the operation; None if the run ended before it was killed."""
    events: dict[int, list[dict[str, Any]]]
    """By rank: steps, evaluations, and operations on files."""
    end_s: float
    """From the kill, or the start, to the end of the last process."""
    hung: str
    """What was still running at the limit."""


def start(config: Path, engine: str, world_size: int, kill: PlannedKill | None, how: HowKilled = "KILL") -> End:
    """Train ``config``, a YAML file, and wait until every process has ended; none is left when it returns."""
    processes.adopt_orphans()
    records, began = config.parent / "records", time.time()
    shutil.rmtree(records, ignore_errors=True)
    records.mkdir()
    plan = AuditPlan(
        str(records), kill, signal=how, detail="places", roots=(str(config.parent),), thorough=True
    ).write(config.parent / "plan.json")  # fmt: skip
    # Loader workers have sockets there, whose paths must be short; a killed one leaves them.
    with tempfile.TemporaryDirectory(prefix="kill-", ignore_cleanup_errors=True) as temporary:
        environ = {"TMPDIR": temporary, PLAN: str(plan), "PYTHONPATH": f"{HOOK}{os.pathsep}{ROOT}",
                   "TORCHINDUCTOR_CACHE_DIR": str(config.parents[1] / "inductor")}  # fmt: skip
        body = partial(_ranks if engine == "bare" else _launch, engine, config, world_size)
        launcher: Any = Forked(body, config.parent / "terminal.txt", environ)
        with Watch(launcher, ProcessFamily(launcher.pid, str(plan)), records, _sent(kill, how)) as watch:
            hung = watch.wait(RUN_S, RUN_S, END_S, END_S)
            killed = watch.mark()
            if killed and watch.code is None and _sent(kill, how) in ("TERM", "INT"):
                hung = f"it had not ended after {END_S:.0f} s"
            if hung:
                processes.send(signal.SIGUSR2, descendants(os.getpid()))
                time.sleep(_STACKS_S)
        since = killed["time"] if killed else began
        left = _left(END_S - (time.time() - since) if killed else END_S)
        end_s = time.time() - since
    codes = [watch.code] if watch.code is not None and not hung else []
    with suppress(FileNotFoundError):
        codes = json.loads((records / "codes.json").read_text())
    return End(codes, killed, saved_files.events_by_rank(records), max(0.0, end_s), hung or left)


def _sent(kill: PlannedKill | None, how: str) -> str:
    """The signal that the watch sends."""
    return how if kill and kill.target == "all" else ""


class Forked:
    """The methods of subprocess.Popen that a watch uses, for ``body`` in a process that is forked and dies with this
    one."""

    def __init__(self, body: Callable[[], None], terminal: Path, environ: Mapping[str, str]) -> None:
        sys.stdout.flush()
        bind, self._code = processes.terminated_with_parent(), None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            if bind is not None:
                bind()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            output = os.open(terminal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (output, 1), (output, 2)):
                os.dup2(source, target)
            os.environ.update(environ)
            tempfile.tempdir = None
            os.chdir(ROOT)
            multiprocessing.process.current_process()._config["authkey"] = b"campaign"  # type: ignore[attr-defined]
            body()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        finally:
            os._exit(1)

    def poll(self) -> int | None:
        """Return the exit code, or minus a signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout_s)
            time.sleep(_POLL_S)
        return code


def _ranks(engine: str, config: Path, world_size: int) -> None:
    """Be the parent of ranks that read RANK and WORLD_SIZE from the environment; write their exit codes."""
    port, temporary = free_port(), os.environ["TMPDIR"]
    ranks = []
    for rank in range(world_size):
        environ = {"TMPDIR": temporary} if world_size == 1 else {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        ranks.append(Forked(partial(_rank, config), config.parent / "terminal.txt", environ))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    codes = [rank.wait(2 * RUN_S) for rank in ranks]
    write_atomically(config.parent / "records" / "codes.json", json.dumps(codes))
    os._exit(0)


def _rank(config: Path) -> None:
    torch.set_num_threads(1)  # replaces the thread pool, which torch cannot do once there are threads
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    record_this_process(Path(os.environ[PLAN]))
    command(["train", "-c", str(config)])


def _launch(engine: str, config: Path, world_size: int) -> None:
    """Be the launcher ``engine`` for ``config``."""
    if engine == "harness launch":
        command(["launch", "-c", str(config), "--engine", "local", "--nproc", str(world_size)])
    from torch.distributed import launch, run

    words = ["--standalone", f"--nproc_per_node={world_size}", str(ROOT / "driver.py"), "-c", str(config)]
    (run if engine == "torchrun" else launch).main(words)
    leave(0)


def _left(limit_s: float) -> str:
    """Wait for the processes that ended ones have left to this one, such as loader workers; name what runs on."""
    deadline = time.monotonic() + limit_s
    while found := descendants(os.getpid()):
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            names = "; ".join(f"{pid}: {_command(pid)}" for pid in found)
            processes.send(signal.SIGKILL, found)
            return f"still running: {names}"
        time.sleep(_POLL_S)
    return ""


def descendants(pid: int) -> list[int]:
    """The processes that ``pid`` started, and those that they started."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listed.read_text().split()):
                found += [child, *descendants(child)]
    return found


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    return "?"
