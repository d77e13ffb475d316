"""Files that hold the RankExit of each rank: ``logs/rank-N.exit.json`` in the run folder, and the error file of torch's
launcher.

A rank that was killed leaves neither.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from harness.distributed.launch_env import Launch
from harness.distributed.rank_exit import RankExit, to_torch_error_file
from harness.runs import layout
from harness.runs.files import read_json, write_atomically


def write(logs: Path, exit: RankExit) -> None:
    """Write the record of a rank. Never raises: the exit itself matters more."""
    with suppress(OSError):
        write_atomically(logs / layout.rank_exit(exit.rank), exit.to_json() + "\n")


def write_for_torch(launch: Launch, exit: RankExit) -> None:
    """Write the record where torch's launcher reads it, if that started this rank. Never raises."""
    if launch.error_file:
        with suppress(OSError):
            write_atomically(Path(launch.error_file), to_torch_error_file(exit, launch.world_size))


def read(logs: Path) -> dict[int, RankExit]:
    """The records in ``logs``, by rank."""
    found = {}
    for path in logs.glob(layout.RANK_EXITS):
        with suppress(OSError, ValueError):
            exit = RankExit.from_dict(read_json(path))
            if exit.rank is not None:
                found[exit.rank] = exit
    return dict(sorted(found.items()))


def remove(logs: Path) -> None:
    """Remove the records of an earlier start."""
    for path in logs.glob(layout.RANK_EXITS):
        with suppress(OSError):
            path.unlink()


class ExitFiles:
    """The records of one start. Create it before that start: files that already exist belong to an earlier one.

    Earlier records are remembered, not removed: ranks of another machine may be writing theirs to the same disk.
    """

    def __init__(self, logs: Path) -> None:
        self._logs, self._earlier = logs, read(logs)

    def read(self) -> dict[int, RankExit]:
        return {rank: exit for rank, exit in read(self._logs).items() if exit != self._earlier.get(rank)}
