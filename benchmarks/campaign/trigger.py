"""Inside a rank: count the operations of each part of training, and send a signal at a chosen one.

Operations are every file operation below the chain's folder (open for writing, write, fsync, rename, remove, mkdir,
rmdir, chmod, truncate), every step, and every evaluation batch. A write that is hit is torn: half of it arrives.
"""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import io
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

VARIABLE = "CAMPAIGN_KILL"  # for ranks that a launcher starts: the arguments of ``arm`` as JSON
_EVENTS = {"os.rename": "rename", "os.remove": "remove", "os.mkdir": "mkdir", "os.rmdir": "rmdir", "os.chmod": "chmod",
           "os.truncate": "truncate", "open": "open"}  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """Send ``signal`` to ``target`` (one rank, all ranks, launcher), ``delay_s`` after operation ``number`` of rank
    ``rank`` in ``place``. A rank that is stopped (SIGSTOP) is killed ``then_s`` later by the campaign."""

    rank: int
    place: str
    number: int
    signal: int
    target: str
    delay_s: float
    then_s: float

    @property
    def from_outside(self) -> bool:
        """True if another process sends the signal: a loader worker obeys SIGTERM from its own rank."""
        return self.target == "all ranks" and self.signal not in (signal.SIGKILL, signal.SIGSTOP)

    @property
    def how(self) -> str:
        name = signal.Signals(self.signal).name.removeprefix("SIG")
        return "STOP, then KILL" if name == "STOP" else name


class Trigger:
    """Counts the operations of this rank by place; at the one of ``kill`` it reports and sends the signal."""

    def __init__(self, root: str, report: str, rank: int, kill: Kill | None) -> None:
        self._root, self._report, self._rank = root, report, rank
        self._kill = kill if kill and kill.rank == rank else None
        self._local, self._default, self._pid = threading.local(), "start-up", os.getpid()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def operation(self, name: str) -> bool:
        """Count an operation of the calling thread's place. True if it is the one to kill at."""
        if os.getpid() != self._pid:  # a loader worker
            return False
        place = getattr(self._local, "place", self._default)
        with self._lock:
            self.counts[place] += 1
            kill = self._kill
            hit = kill is not None and place == kill.place and self.counts[place] == kill.number
        if hit and name != "write":
            self.fire(name)
        return hit

    def fire(self, name: str) -> None:
        kill = self._kill
        assert kill is not None
        self.report(fired=name, pid=os.getpid(), time=time.monotonic() + kill.delay_s)
        if kill.delay_s:
            threading.Thread(target=self._send, args=(kill,), daemon=True).start()
        else:
            self._send(kill)

    @staticmethod
    def _send(kill: Kill) -> None:
        time.sleep(kill.delay_s)
        if kill.from_outside:
            time.sleep(0.05)  # the campaign sends it
        elif kill.target == "all ranks":
            os.killpg(os.getpgrp(), kill.signal)
        else:
            os.kill(os.getppid() if kill.target == "launcher" else os.getpid(), kill.signal)

    def report(self, **facts: Any) -> None:
        line = json.dumps({"rank": self._rank, **facts}) + "\n"
        file = os.open(self._report, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line.encode())
        os.close(file)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS:
            path = arguments[0]
            if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
            # Relative names belong to a folder that is being removed.
            if isinstance(path, str) and (path.startswith(self._root) or not path.startswith("/")):
                self.operation(_EVENTS[event])

    def inside(self, owner: Any, name: str, place: str, after: str = "") -> None:
        """Count the operations of the function ``owner.name`` under ``place``, and all later ones under ``after``."""
        function = getattr(owner, name)

        def placed(*args: Any, **options: Any) -> Any:
            before = getattr(self._local, "place", None)
            self._local.place = place
            try:
                return function(*args, **options)
            finally:
                if before is None:
                    del self._local.place
                else:
                    self._local.place = before
                self._default = after or self._default

        setattr(owner, name, placed)

    def counted(self, owner: Any, name: str, operation: str) -> None:
        """Make each return of the function ``owner.name`` an operation."""
        function = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            found = function(*args, **options)
            self.operation(operation)
            return found

        setattr(owner, name, call)


def arm(root: str, report: str, rank: int, kill: dict[str, Any] | None) -> None:
    """Count the operations of this process from now on, and ``kill`` it at one of them. ``root``: the folder whose
    files count; ``report``: a file that receives a JSON line for the kill, or the counts at the end."""
    from harness.runs.remote import RemoteRunFolder
    from harness.training import checkpointing, loop
    from harness.training.checkpoint_writer import CheckpointWriter
    from harness.training.evaluation import evaluate

    trigger = Trigger(root, report, rank, Kill(**kill) if kill else None)
    trigger.inside(loop, "train", "loop", after="end")
    trigger.inside(loop, "epoch", "step")
    trigger.inside(loop, "evaluation", "evaluation")
    trigger.inside(CheckpointWriter, "_write", "checkpoint")  # in a thread of its own
    for module in (loop, checkpointing):
        trigger.inside(module, "save", "checkpoint")
        trigger.inside(module, "keep_best", "checkpoint")
    trigger.inside(RemoteRunFolder, "_upload", "upload")
    trigger.counted(loop, "count", "step")
    trigger.counted(evaluate, "prepare", "batch")
    trigger.counted(os, "fsync", "fsync")
    _count_writes(trigger)
    sys.addaudithook(trigger.audit)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the campaign asks a rank that hangs where it is
    if kill is None:
        atexit.register(lambda: trigger.report(counts=trigger.counts))


def _count_writes(trigger: Trigger) -> None:
    """Make ``open`` return files whose writes to the system are operations."""
    real: Callable[..., Any] = io.open

    class Counted(io.FileIO):
        def write(self, data: Any) -> int:
            if trigger.operation("write"):
                super().write(memoryview(data)[: len(data) // 2])
                trigger.fire("write")
                return super().write(memoryview(data)[len(data) // 2 :]) + len(data) // 2
            return super().write(data)

    def opened(
        file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, errors: str | None = None,
        newline: str | None = None, closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        if mode.strip("bt") not in ("w", "a", "x") or isinstance(file, int) or buffering != -1 or opener:
            return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
        buffered = io.BufferedWriter(Counted(os.fspath(file), mode.strip("bt")))
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    builtins.open = io.open = opened  # type: ignore[assignment]


def environment(root: str, report: str, kill: Kill | None) -> dict[str, str]:
    """The variable with which ``python -m benchmarks.campaign.rank`` arms a rank that a launcher starts."""
    return {VARIABLE: json.dumps({"root": root, "report": report, "kill": asdict(kill) if kill else None})}
