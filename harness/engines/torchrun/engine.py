"""Engine torchrun: torch's own elastic launcher, one on each machine, started by a ``harness launch`` of that machine.

It starts the ranks, and starts them anew when some are lost or a machine joins; what follows it here sees to it that
it ends when its ranks have, and brings their last words home. Where they meet is worked out in ``meeting``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness.distributed.monitor import Outcome
from harness.engines.base import Job, shell
from harness.engines.torchrun import error_files, rendezvous
from harness.errors import EXIT_DONE, EXIT_STOPPED, EXIT_USAGE
from harness.runs import layout, rank_exit

KILL_S = 5.0  # from SIGTERM to SIGKILL
ORPHANS_S = 20.0  # for ranks to end whose launcher was killed; harness.distributed.watchdog gives them 13
_POLL_S, _LOOK_S = 0.1, 1.0
WAIT_S = {  # how long a launcher may stay when its ranks are gone, by how they ended
    "done": 30.0,  # it waits for the other machines, up to five minutes; all ranks end together, so they are done too
    "stopped": 2.0,  # without a range of machines, it would wait for those that have left with it
    "failed": 5.0,  # it has no restart left, and asks a machine that is out of reach
}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def render(job: Job) -> str:
    where = rendezvous.of(job)
    note = "# DIR is an empty folder of this machine, for what the ranks say last"
    every = f"; the same command on each of the {job.settings.nnodes} machines" if job.settings.nnodes > 1 else ""
    return f"{note}{every}\n{shell(_command(job, where, 'DIR'), _environ(job, where))}\n"


def start(job: Job) -> Torchrun:
    return Torchrun(job)


class Torchrun:
    """The launcher of this machine and its ranks."""

    def __init__(self, job: Job) -> None:
        self._job, self._where = job, rendezvous.of(job)
        self._asked, self._deadline = 0, float("inf")
        self._idle_since: float | None = None
        self._earlier = rank_exit.read(job.folder / layout.LOGS)
        self._words = Path(tempfile.mkdtemp(prefix="harness-torchrun-"))
        try:
            # A session of its own: the terminal's Ctrl-C comes through ``stop`` alone, once.
            self._agent = subprocess.Popen(
                _command(job, self._where, str(self._words)),
                env={**os.environ, **_environ(job, self._where)},
                start_new_session=True,
                preexec_fn=_end_with_this_process(),
            )
        except BaseException:
            shutil.rmtree(self._words, ignore_errors=True)
            raise

    def stop(self) -> None:
        """SIGTERM, which the launcher passes on to its ranks; called again, or after the grace period, SIGKILL."""
        self._asked += 1
        self._end_by(time.monotonic() + self._job.settings.grace_s + KILL_S if self._asked == 1 else 0.0)

    def follow(self) -> Outcome:
        try:
            look_at = 0.0
            while self._agent.poll() is None:
                now = time.monotonic()
                if now > self._deadline:
                    self._agent.kill()
                if now > look_at:
                    self._end_if_idle(now)
                    look_at = now + _LOOK_S
                time.sleep(_POLL_S)
            self._end_orphans()
            return self._outcome()
        finally:
            shutil.rmtree(self._words, ignore_errors=True)

    def _end_by(self, deadline: float) -> None:
        """SIGTERM to the launcher, once, and SIGKILL at ``deadline``."""
        told, self._deadline = self._deadline < float("inf"), min(self._deadline, deadline)
        if not told:
            with suppress(ProcessLookupError):
                self._agent.terminate()

    def _end_if_idle(self, now: float) -> None:
        """End a launcher that has nothing left to wait for."""
        how = self._over()
        if not how or error_files.speakers(self._words):
            self._idle_since = None
            return
        self._idle_since = self._idle_since or now
        if now > self._idle_since + WAIT_S[how]:
            self._end_by(now + KILL_S)

    def _over(self) -> str:
        """How the run has ended on this machine, by what its ranks said; empty while it has not, or may go on."""
        attempt, said = error_files.read(self._words)
        codes = [words.exit_code for words in said]
        if not codes:
            return ""
        if EXIT_STOPPED in codes:
            return "" if self._where.elastic else "stopped"
        if set(codes) == {EXIT_DONE}:
            return "done" if len(codes) == self._job.settings.nproc else ""
        return "failed" if attempt >= self._job.settings.max_restarts else ""

    def _end_orphans(self) -> None:
        """Wait for ranks that outlived their launcher; they know, and end by themselves."""
        patience = time.monotonic() + ORPHANS_S
        while left := error_files.speakers(self._words):
            if time.monotonic() > min(patience, self._deadline):
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)

    def _outcome(self) -> Outcome:
        _, said = error_files.read(self._words)
        if not said and self._agent.returncode > 0 and not self._asked and not error_files.begun(self._words):
            raise self._where.failed()
        exits = {words.rank: words.exit_code for words in said}
        world_size = max((words.world_size for words in said), default=self._job.world_size)
        return Outcome(exits, self._lost(exits, world_size), bool(self._asked), world_size)

    def _lost(self, exits: dict[int, int], world_size: int) -> str:
        """Why there are ranks that no file tells of, if there are and the run has failed."""
        code, codes = self._agent.returncode, set(exits.values())
        # All ranks are done together, and a rank of this machine that was refused has told why.
        if code == 0 or codes == {EXIT_DONE} or EXIT_USAGE in codes:
            return ""
        known = exits.keys() | rank_exit.since(self._earlier, self._job.folder / layout.LOGS).keys()
        silent = [str(rank) for rank in range(world_size) if rank not in known]
        if not silent or (self._asked and codes <= {EXIT_DONE, EXIT_STOPPED}):
            return ""
        if code < 0 and self._deadline == float("inf"):  # else it was ended here
            return f"its launcher on {socket.gethostname()} died of signal {-code}"
        others = f" (so did {', '.join(silent[1:])})" if silent[1:] else ""
        return f"it left no word{others}: killed from outside, or its machine is gone"


def _command(job: Job, where: rendezvous.Meeting, words: str) -> list[str]:
    settings = job.settings
    python, *driver = job.command()
    return [
        python, "-m", "torch.distributed.run", *where.options(), f"--nproc-per-node={settings.nproc}",
        f"--max-restarts={settings.max_restarts}", f"--log-dir={words}", *driver,
    ]  # fmt: skip


def _environ(job: Job, where: rendezvous.Meeting) -> dict[str, str]:
    return {
        **where.environ(),
        # By default it kills ranks 30 s after a signal. (An option says the same, but only to newer versions of torch.)
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(job.settings.grace_s)),
        "TORCHELASTIC_ERROR_FILE": os.devnull,  # for its own last words, else it complains that there is no such file
        **job.environ(),
    }


def _end_with_this_process() -> Callable[[], None] | None:
    """What the launcher's process is to do first: ask the kernel for SIGTERM when this process dies, however it dies.

    The kernel means the thread that started it, which only the main one is sure to outlive."""
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return ask
