"""Following a file to which another process appends lines, such as the log of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.runs.files import parse_json

_KEPT_BYTES = 4096  # of what was read, by which a file that was rewritten is told


class FollowedFile:
    """Reads the lines that the file at ``path`` grows by, each once; it need not exist yet.

    A file that no longer holds the end of what was read was truncated or rewritten: ``rewritten`` is called, and the
    next line is its first.
    """

    def __init__(self, path: Path, rewritten: Callable[[], object] = lambda: None, limit: int = 1 << 20) -> None:
        """``limit``: bytes of one ``read``."""
        self._path, self._rewritten, self._limit = path, rewritten, limit
        self._offset, self._kept = 0, b""

    def read(self, final: bool = False) -> list[bytes]:
        """Return the complete lines since the last call, without their ends; call it until it returns none. A line of
        ``limit`` bytes or more comes in parts. ``final``: nothing more is written, so a last line without an end, too.
        """
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset - len(self._kept))
                if file.read(len(self._kept)) != self._kept:
                    self._rewritten()
                    self._offset, self._kept = file.seek(0), b""
                fresh = file.read(self._limit)
        except OSError:
            return []
        end, is_full = fresh.rfind(b"\n") + 1, len(fresh) == self._limit
        is_part = not end if is_full else final  # of a line too long for one read, or the last line
        if not is_part:
            fresh = fresh[:end]
        self._offset += len(fresh)
        self._kept = (self._kept + fresh)[-_KEPT_BYTES:]
        return fresh.removesuffix(b"\n").split(b"\n") if fresh else []


def read_entry(line: bytes) -> dict[str, Any] | None:
    """Return the entry of the metrics log in ``line``; None if the line is damaged."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step", 0), int) else None
