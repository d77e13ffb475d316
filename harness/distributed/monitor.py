"""Following a launched run to its end, while signals to this process stop it."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from harness.distributed import signals
from harness.distributed.rank_exit import RankExit

_STOPPING = "stopping: every rank writes a checkpoint; press Ctrl-C again to kill them"
_POLL_S = 0.1


@dataclass(frozen=True)
class EngineReport:
    """The end of a run, as its engine observed it."""

    exits: list[RankExit] = field(default_factory=list)
    """The rank exits that the engine saw, in the order in which they ended. Ranks that it cannot observe are absent."""
    stopped: bool = False
    """A user or a scheduler asked for the end."""
    world_size: int | None = None
    """Ranks of the last start, if that differs from what was asked for."""


class LaunchedRun(Protocol):
    """A run that an engine has started. ``follow`` and ``stop`` are called from two threads."""

    def follow(self) -> EngineReport:
        """Show the terminal output of rank 0 and the errors of all ranks until no process of the run is left. Only the
        wait for training itself is unbounded."""
        ...

    def stop(self) -> None:
        """Ask all ranks to write a checkpoint and end; the second call kills them. Returns soon, never raises."""
        ...


def follow_until_done(run: LaunchedRun, stopping: str = _STOPPING) -> EngineReport:
    """Follow ``run`` to its end. The first SIGINT, SIGTERM or SIGHUP stops it and prints ``stopping``; the next one
    kills it."""
    with signals.counted() as num_signals, ThreadPoolExecutor(1, "harness-follow") as pool:
        following, handled = pool.submit(run.follow), 0
        while not following.done():
            if (count := num_signals()) > handled:
                handled = count
                print(stopping, file=sys.stderr)
                run.stop()
            time.sleep(_POLL_S)
        return following.result()
