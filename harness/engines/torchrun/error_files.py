"""What ranks under torch's launcher leave for it in its folder, and which processes may yet do so.

``DIR/RUN_*/attempt_N/LOCAL_RANK/error.json``, written by ``harness.runs.rank_exit.tell_launcher``; N counts the restarts.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Words:
    rank: int
    world_size: int
    exit_code: int


def read(folder: Path) -> tuple[int, list[Words]]:
    """The number of the last start, from 0, and what its ranks have said so far."""
    attempts = begun(folder)
    last = max(attempts, default=0)
    said = []
    for path in attempts[last].glob("*/error.json") if attempts else ():
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text(encoding="utf-8"))
            said.append(Words(content["rank"], content["world_size"], content["exit_code"]))
    return last, said


def begun(folder: Path) -> dict[int, Path]:
    """The starts of this machine's ranks, by number."""
    return {int(path.name.rpartition("_")[2]): path for path in folder.glob("*/attempt_*")}


def speakers(folder: Path) -> list[int]:
    """Process ids of the ranks, and of what they started in turn, that are there. Linux only; elsewhere none."""
    mark = f"={folder}{os.sep}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found
