"""The error files that ranks under torch's launcher write: ``DIR/RUN_*/attempt_N/LOCAL_RANK/error.json``.

``harness.runs.exit_files`` writes them. N counts the restarts.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from harness.distributed.rank_exit import RankExit, from_torch_error_file


def read(folder: Path) -> tuple[int, list[RankExit], int | None]:
    """The newest attempt, from 0; the exits of its local ranks so far, by time; and the world size they reported."""
    folders = attempts(folder)
    newest = max(folders, default=0)
    exits, world_size = [], None
    for path in folders[newest].glob("*/error.json") if folders else ():
        with suppress(OSError, ValueError, KeyError, TypeError):
            exit, world_size = from_torch_error_file(path.read_text(encoding="utf-8"))
            exits.append(exit)
    return newest, sorted(exits, key=lambda exit: exit.time), world_size


def attempts(folder: Path) -> dict[int, Path]:
    """The folder of each start of this machine's ranks, by number."""
    return {int(path.name.rpartition("_")[2]): path for path in folder.glob("*/attempt_*")}


def rank_processes(folder: Path) -> list[int]:
    """Ids of the ranks' processes and of those that they started. Linux only; elsewhere none."""
    mark = f"={folder}{os.sep}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found
