"""Which run folders are the user's own: those of runs that this user started on this machine, by their config.yaml.

The content decides, not the path: a run may be moved, copied, or kept at a URL. A file in the user's cache has the
SHA-256 of each such configuration. Without that file, no run is the user's own, so every run needs ``--trust``.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from harness.errors import ConfigError
from harness.runs import layout
from harness.runs.files import default_cache_dir, read_bytes


def remember(config_text: str) -> None:
    """Note that a start of this user writes ``config_text`` as a config.yaml. Never raises."""
    line = _line(config_text.encode())
    with suppress(OSError, ConfigError):  # the latter without a place for a cache
        if line in _known():
            return
        path = _list()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Private, since whoever can write this file can make this user run code.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "ab") as file:
            file.write(line)


def is_own(run: Path) -> bool:
    """Return True if a start of this user on this machine wrote the configuration in the folder ``run``."""
    with suppress(OSError, ConfigError):  # the latter without a place for a cache
        return _line(read_bytes(run / layout.CONFIG)) in _known()
    return False


def _known() -> list[bytes]:
    with suppress(OSError), open(_list(), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return file.readlines()
    return []


def _line(config: bytes) -> bytes:
    return hashlib.sha256(config).hexdigest().encode() + b"\n"


def _list() -> Path:
    return default_cache_dir() / f"own-configurations-{os.getuid()}"
