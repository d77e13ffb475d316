"""Following what was started, while signals to this process ask it to stop."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from harness.distributed import signals

_STOPPING = "stopping: every rank writes a checkpoint; once more ends them at once"
_POLL_S = 0.1


@dataclass(frozen=True)
class Outcome:
    """What an engine saw of a run that is over."""

    exits: dict[int, int] = field(default_factory=dict)
    """Exit code by rank, or minus the signal it died of, the first to end first; ranks that the engine knows nothing of
    are absent."""
    lost: str = ""
    """What went away under the ranks, if that is how it ended: "worker tcp://10.0.0.2:4000 died"."""
    stopped: bool = False
    """Somebody asked for the end."""
    world_size: int | None = None
    """How many ranks the last start had; null: as many as were asked for."""
    lost_rank: int | None = None
    """The rank that went with it, where the engine knows."""


class Started(Protocol):
    """A run that an engine has started. ``follow`` and ``stop`` are called from two threads."""

    def follow(self) -> Outcome:
        """Show what rank 0 shows on its terminal, and the errors that others show, until nothing of the run is left
        anywhere. No wait in it is unbounded, but that for training itself."""
        ...

    def stop(self) -> None:
        """Ask all ranks to write a checkpoint and end; called again: end them at once. Returns soon, never raises."""
        ...


def attend(started: Started, stopping: str = _STOPPING) -> Outcome:
    """Follow ``started`` to its end; a signal stops it, a second one ends it at once. ``stopping`` is what to say."""
    with signals.counted() as asked, ThreadPoolExecutor(1, "harness-follow") as pool:
        following, heard = pool.submit(started.follow), 0
        while not following.done():
            if (count := asked()) > heard:
                heard = count
                print(stopping, file=sys.stderr)
                started.stop()
            time.sleep(_POLL_S)
        return following.result()
