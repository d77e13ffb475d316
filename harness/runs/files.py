"""Local files: atomic writes, JSON-safe numbers, the cache folder, and telling a URL from a path."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def is_url(place: str) -> bool:
    return "://" in place


def temporary_for(path: Path) -> Path:
    """The name under which ``path`` is written until it is complete. Readers of a folder skip ``*.tmp``."""
    return path.with_name(path.name + ".tmp")


def commit(temporary: Path, path: Path) -> None:
    """Move a complete file or folder to its final name, durably: the data first, then the rename.

    A reader finds the old content or the new, also after a power cut. The files inside a folder must be synced already.
    """
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end of the block it replaces ``path``. An error removes it.

    The new file has the permissions that the umask gives, even if the writer is a library that creates private files.
    """
    temporary = temporary_for(path)
    try:
        with open(temporary, "wb"):
            mode = temporary.stat().st_mode
        yield temporary
        if temporary.stat().st_mode != mode:
            temporary.chmod(mode & 0o777)
        commit(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by a file with ``content`` (text as UTF-8)."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def finite(value: Any) -> Any:
    """``value`` with null for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def identity(path: Path) -> tuple[int, int] | None:
    """Inode and modification time, to notice later that ``path`` was replaced; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def default_cache_dir() -> Path:
    """$APEX_HARNESS_CACHE, else $XDG_CACHE_HOME/apex-harness, else ~/.cache/apex-harness."""
    if chosen := os.environ.get("APEX_HARNESS_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "apex-harness"
