"""Files that hold a RankExit: ``logs/rank-N.exit.json`` of each rank, ``failure.json`` of the one that failed first,
and the error file of torch's launcher.

A rank that was killed leaves none.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from harness.distributed.launch_env import Launch
from harness.distributed.rank_exit import Cause, RankExit
from harness.runs import layout
from harness.runs.files import commit, identity, read_json, temporary_for, write_atomically

EARLY = "HARNESS_EARLY_FAILURE"  # path of the file for a failure before the run folder is claimed; set by a sweep


def write(logs: Path, record: RankExit) -> None:
    """Write the record of a rank. Never raises: the exit itself matters more."""
    with suppress(OSError):
        write_atomically(logs / layout.rank_exit(record.rank), record.to_json() + "\n")


def write_for_torch(launch: Launch, record: RankExit) -> None:
    """Write the record where torch's launcher reads it, if that started this rank. Never raises."""
    if launch.error_file:
        with suppress(OSError):
            write_atomically(Path(launch.error_file), to_torch_error_file(record, launch.world_size))


def to_torch_error_file(record: RankExit, world_size: int) -> str:
    """Return ``record`` in the format of torch.distributed.elastic, whose summary then shows this error.

    torch reports the error file with the earliest timestamp as the root cause, and compares whole seconds. A peer often
    notices a failure within the same second, so a consequence is dated one second later.
    """
    is_consequence = record.cause in (Cause.PEER_LOST, Cause.LAUNCHER_LOST)
    error = f"{record.error or record.cause.value}: {record.message}"
    text = error if is_consequence else "".join(record.traceback) or error
    if record.cause is Cause.HUNG:
        text += f"\n{error}"
    timestamp = int(record.time) + is_consequence
    message = {
        "message": record.message.partition("\n")[0],
        "extraInfo": {"py_callstack": text, "timestamp": str(timestamp)},
    }
    return json.dumps({"message": message, "exit": asdict(record), "world_size": world_size})


def from_torch_error_file(text: str) -> tuple[RankExit, int]:
    """Return the record and the world size. Raises KeyError, TypeError or ValueError for a file that is not of this
    project."""
    content = json.loads(text)
    return RankExit.from_dict(content["exit"]), int(content["world_size"])


def write_early(record: RankExit) -> None:
    """Write a failure before the run folder was claimed to the file of EARLY, over that of an earlier start; a
    consequence of another failure only if there is none. Never raises."""
    path = Path(os.environ.get(EARLY, ""))
    if EARLY in os.environ and not (record.cause in (Cause.PEER_LOST, Cause.LAUNCHER_LOST) and path.exists()):
        with suppress(OSError):
            write_atomically(path, record.to_json() + "\n")


def write_first(folder: Path, first: RankExit) -> RankExit:
    """Write failure.json unless another rank was first; return the failure in the file. Never raises."""
    path = folder / layout.FAILURE
    temporary = temporary_for(path, f"{socket.gethostname()}-{os.getpid()}")
    with suppress(OSError):  # a full disk or a missing folder; the log and the terminal show the error
        write_atomically(temporary, first.to_json() + "\n")
        try:
            os.link(temporary, path)
        except OSError:
            if not path.exists():  # a file system without hard links
                commit(temporary, path)
    with suppress(OSError):
        temporary.unlink(missing_ok=True)
    return read_record(path) or first


def read(logs: Path) -> dict[int, RankExit]:
    """Return the records in ``logs``, by rank."""
    records = map(read_record, logs.glob(layout.RANK_EXITS))
    exits = {record.rank: record for record in records if record and record.rank is not None}
    return dict(sorted(exits.items()))


def read_record(path: Path) -> RankExit | None:
    """Return the record in a file; None if there is none, or not yet."""
    with suppress(OSError, ValueError):
        return RankExit.from_dict(read_json(path))
    return None


def remove(logs: Path) -> None:
    """Remove the records of an earlier start."""
    for path in logs.glob(layout.RANK_EXITS):
        with suppress(OSError):
            path.unlink()


class ExitFiles:
    """The records of one start. Create it before that start: files that already exist belong to an earlier one.

    Earlier records are remembered, not removed: ranks of another machine may be writing theirs to the same disk.
    """

    def __init__(self, folder: Path) -> None:
        """``folder``: the run folder."""
        self._logs, self._failure = folder / layout.LOGS, folder / layout.FAILURE
        self._earlier, self._earlier_failure = read(self._logs), identity(self._failure)

    def read(self) -> dict[int, RankExit]:
        """Return the records of the ranks."""
        return {rank: record for rank, record in read(self._logs).items() if record != self._earlier.get(rank)}

    def first(self) -> RankExit | None:
        """Return the failure in failure.json."""
        return read_record(self._failure) if identity(self._failure) != self._earlier_failure else None
