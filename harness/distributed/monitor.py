"""Following a launched run to its end, while signals to this process stop it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from harness.distributed import signals
from harness.distributed.rank_exit import RankExit
from harness.distributed.threads import Background

_STOPPING = "every rank will write a checkpoint; Ctrl-C or another signal kills the ranks"
_POLL_S = 0.1


@dataclass(frozen=True)
class EngineReport:
    """The end of a run, as its engine observed it."""

    exits: list[RankExit] = field(default_factory=list)
    """The rank exits that the engine saw, in the order in which they ended. Ranks that it cannot observe are absent."""
    stopped: bool = False
    """A user or a scheduler requested the stop."""
    world_size: int | None = None
    """Ranks of the last start, if that differs from the requested number."""
    signal: int = 0
    """The signal by which this process was asked to stop; 0: none."""


class LaunchedRun(Protocol):
    """A run that an engine has started. ``follow`` and ``stop`` are called from two threads."""

    def follow(self) -> EngineReport:
        """Show the terminal output of rank 0 and the errors of all ranks until no process of the run is left. Only the
        wait for training itself is unbounded."""
        ...

    def stop(self) -> None:
        """Ask all ranks to write a checkpoint and end; the second call kills them. Returns soon, never raises."""
        ...


def tell(text: str) -> None:
    """Print to the terminal. If that is gone, which a SIGHUP tells too, the run is still to be followed and stopped."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def follow_until_done(start: Callable[[], LaunchedRun], stopping: str = _STOPPING) -> EngineReport:
    """Start a run and follow it to its end. The first signal (harness.distributed.signals) stops it and prints its name
    and ``stopping``; the next one kills it."""
    with signals.counted() as requests:
        run = start()
        requests.obeyed = True
        following, handled = Background(run.follow, "harness-follow"), 0
        while wait([following], _POLL_S).not_done:
            if (count := len(requests.numbers)) > handled:
                handled = count
                message = f"killing all ranks ({signals.signal_name(requests.numbers[-1])})"
                if count == 1:
                    message = f"stopping ({signals.signal_name(requests.numbers[0])}): {stopping}"
                tell(f"{signals.clear_line()}{message}")
                run.stop()
        return replace(following.result(), signal=next(iter(requests.numbers), 0))
