"""The JSONL file that is the record of a run. Rank 0 writes; on the other ranks nothing happens."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Protocol

from harness.errors import CheckpointError
from harness.runs.files import finite
from harness.trackers.mirror import Sample

# Fields that differ between two runs that are otherwise equal.
TIMES = (
    "wall_s", "samples_per_s", "data_wait",
    "time_data", "time_forward", "time_backward", "time_reduce", "time_optimizer", "time_host",
)  # fmt: skip


class Tracker(Protocol):
    """What a run tells its numbers to; every rank has one."""

    def log(self, split: str, values: dict[str, Any]) -> None: ...

    def offset(self) -> int: ...

    def rewind(self, offset: int) -> None: ...

    def show(self, sample: Sample) -> None: ...

    def close(self, done: bool = False) -> None: ...


class Nothing:
    """The tracker of a rank that does not write."""

    def log(self, split: str, values: dict[str, Any]) -> None:
        pass

    def offset(self) -> int:
        return 0

    def rewind(self, offset: int) -> None:
        pass

    def show(self, sample: Sample) -> None:
        pass

    def close(self, done: bool = False) -> None:
        pass


class JsonLines:
    """``metrics.jsonl``: one object a line, whole lines only, numbers at full precision."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def log(self, split: str, values: dict[str, Any]) -> None:
        """Append a line; not finite numbers, which JSON does not have, are written as null."""
        line = finite({"split": split, **values})
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"cannot be written: {error.strerror}",
            where=str(self._path),
            hint="free some space and start the same command again",
        )

    def offset(self) -> int:
        """Bytes that are safely on disk: a checkpoint promises that they will still be there after a crash."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from None
        return self._file.tell()

    def rewind(self, offset: int) -> None:
        """Forget lines after ``offset``: a resumed run writes them again."""
        size = self._file.seek(0, os.SEEK_END)
        self._file.truncate(min(offset, size))  # a record that was deleted since must not be filled up with zeros
        self._file.seek(0, os.SEEK_END)

    def show(self, sample: Sample) -> None:
        """Predictions have a file of their own."""

    def close(self, done: bool = False) -> None:
        with contextlib.suppress(OSError):  # a line that a full disk has refused, and ``log`` has reported
            self._file.close()
