"""Small files, written so that nobody finds half of one, and numbers as JSON can hold them."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """``text`` at ``path``: all of it or what was there before, also after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def finite(value: Any) -> Any:
    """``value`` with null for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def identity(path: Path) -> tuple[int, int] | None:
    """Which file is at ``path`` now, as something to compare with later; None if there is none."""
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
