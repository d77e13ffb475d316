"""The record of how a rank ended: by itself, or as a consequence of another's end.

A rank writes its own record (harness.training.exit_report). For one that cannot, another rank makes it (``Stalls`` in
watchdog.py), or an engine, of an exit code, a signal or a lost machine. harness.runs.outcome judges all of them.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from pydantic import TypeAdapter

from harness.errors import EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED, EXITS_BY_SIGNAL


class Cause(str, Enum):
    """Why a rank ended."""

    DONE = "done"
    STOPPED = "stopped"  # early, on request; with a checkpoint, unless before the run began
    ERROR = "error"  # its own error
    HUNG = "hung"  # it did not reach a collective in which other ranks waited for it
    PEER_LOST = "peer_lost"  # a consequence: another rank failed or is gone
    LAUNCHER_LOST = "launcher_lost"  # a consequence: the process that started it is gone
    SIGNAL = "signal"  # killed; only an engine can report it
    NODE_LOST = "node_lost"  # its machine, pod, worker or process is gone; an engine or another rank can report it


@dataclass(frozen=True)
class RankExit:
    """The end of one rank."""

    rank: int | None
    """None: the engine cannot tell which rank was lost."""
    cause: Cause
    exit_code: int
    """Minus the signal number for a killed rank."""
    host: str = ""
    """Empty: made by an engine, or by another rank for one that is gone."""
    step: int | None = None
    """None: before this start had claimed the run folder, or unknown to an engine."""
    error: str = ""
    """Type of the error."""
    message: str = ""
    hint: str = ""
    doing: str = ""
    """Function and line where it failed, or where it was when it was notified of another rank's failure."""
    traceback: list[str] = field(default_factory=list)
    time: float = 0.0
    """Seconds since the Unix epoch."""

    @classmethod
    def from_code(cls, rank: int, code: int) -> RankExit:
        """Return the exit of a process, by its code or minus the signal that killed it."""
        causes = {EXIT_DONE: Cause.DONE, **dict.fromkeys((EXIT_STOPPED, *EXITS_BY_SIGNAL), Cause.STOPPED)}
        return cls(rank, Cause.SIGNAL if code < 0 else causes.get(code, Cause.ERROR), code)

    @classmethod
    def now(cls, rank: int | None, cause: Cause, exit_code: int = EXIT_FAILURE, **others: Any) -> RankExit:
        """Return the exit of a rank of this machine at this moment; ``others``: further fields."""
        return cls(rank, cause, exit_code, socket.gethostname(), time=time.time(), **others)

    @classmethod
    def lost(cls, message: str, rank: int | None = None) -> RankExit:
        return cls(rank, Cause.NODE_LOST, EXIT_FAILURE, message=message)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RankExit:
        """Return the inverse of ``asdict``; other keys are ignored. Raises ValueError for content of another shape,
        which a damaged file or another version may have."""
        return _RECORD.validate_python(content)

    @classmethod
    def from_json(cls, text: str) -> RankExit:
        """Return the inverse of ``to_json``. Raises ValueError."""
        return cls.from_dict(json.loads(text))

    @property
    def made_by_rank(self) -> bool:
        """True if a rank has made this record, of itself or of one that hangs.

        False for a record that an engine has made, and for one of a rank that is gone: of that the engine may know
        more, such as the signal that killed it.
        """
        return bool(self.host)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


_RECORD = TypeAdapter(RankExit)
