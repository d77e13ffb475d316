"""How each rank ended: a small file of its own beside its log, which whoever started the ranks makes one report of.

``logs/rank-N.end.json``; a rank that was killed from outside leaves none, and that is told too.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.runs import layout
from harness.runs.files import write_atomically

# Said of a rank whose peer is gone: the peer's end is the cause, and this one a consequence.
LOST_CONTACT = "lost contact with the other ranks"


@dataclass(frozen=True)
class End:
    """The last words of a rank."""

    rank: int
    host: str
    step: int
    exit_code: int
    how: str  # done, stopped, failed, or blocked: waiting for a peer that was gone
    doing: str = ""  # where it was when it failed, or when it heard of another's failure
    reason: str = ""
    time: float = 0.0  # seconds since the epoch


def leave(logs: Path, rank: int, step: int, exit_code: int, how: str, doing: str = "", reason: str = "") -> None:
    """Write the end of ``rank``. Never raises: what it ended with matters more."""
    end = End(rank, socket.gethostname(), step, exit_code, how, doing, reason, time.time())
    with contextlib.suppress(OSError):
        write_atomically(logs / layout.rank_exit(rank), json.dumps(asdict(end)) + "\n")


def tell_launcher(file: str, when: float, text: str, **facts: int) -> None:
    """The same for torch's launcher, in its own format: its summary shows ``text`` instead of "error_file: <N/A>", and
    the rank with the earliest ``when`` (seconds since the epoch) as the cause. ``facts`` are for our own engine."""
    words = {"message": text.partition("\n")[0], "extraInfo": {"py_callstack": text, "timestamp": str(int(when))}}
    with contextlib.suppress(OSError):
        write_atomically(Path(file), json.dumps({"message": words, **facts}))


def read(logs: Path) -> dict[int, End]:
    """The ends found in ``logs``, by rank."""
    found = {}
    for path in logs.glob(layout.RANK_EXITS):
        with contextlib.suppress(OSError, ValueError, TypeError):
            end = End(**json.loads(path.read_text(encoding="utf-8")))
            found[end.rank] = end
    return dict(sorted(found.items()))


def since(earlier: Mapping[int, End], logs: Path) -> dict[int, End]:
    """The same, without those that were there when ``earlier`` was read: another start's."""
    return {rank: end for rank, end in read(logs).items() if end != earlier.get(rank)}


def forget(logs: Path) -> None:
    """Remove the ends of an earlier start."""
    for path in logs.glob(layout.RANK_EXITS):
        with contextlib.suppress(OSError):
            path.unlink()
