"""Files of a job on the disk of a Dask worker, as its client asks for them: listed, read and written in chunks.

Asked beside the tasks. What they mean at home is the business of ``dask_home``.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.engines.dask import worker

CHUNK_BYTES = 8 << 20

Listing = dict[str, tuple[int, int, int]]  # {path in the folder: (bytes, time of change in ns, inode)}


async def on_disk(job: str, function: Callable[..., Any], name: str, *words: Any, dask_worker: Any) -> Any:
    """``function(path, *words)``, one of those below, for the path ``name`` in the job's folder. On a worker that was
    started anew since there is nothing."""
    return await asyncio.to_thread(function, worker.scratch_of(job, dask_worker) / name, *words)


def listing(folder: Path) -> Listing:
    """The files below ``folder``, without those that are being written."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        with suppress(OSError):
            if not any(part.endswith(".tmp") for part in name.parts) and path.is_file():
                stat = path.stat()
                found[name.as_posix()] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return found


def read(path: Path, offset: int, known: int | None) -> tuple[bytes, bool, int]:
    """(bytes from ``offset`` on, whether that was the rest, inode) of a file; ``known``: the inode that the call before
    told, if this goes on after one. Raises FileNotFoundError where the file is gone, or was replaced since."""
    with open(path, "rb") as file:
        inode = os.fstat(file.fileno()).st_ino
        if known not in (None, inode):
            raise FileNotFoundError(f"{path} was replaced")
        file.seek(offset)
        content = file.read(CHUNK_BYTES)
        return content, not file.read(1), inode


def write(path: Path, offset: int, content: bytes) -> None:
    """``content`` at ``offset`` of the file, which ends there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(content)
        file.truncate()


def crc_of(path: Path, size: int) -> int:
    """CRC-32 of the first ``size`` bytes; -1, which is none, of a file that is shorter."""
    value = 0
    with open(path, "rb") as file:
        while size > 0 and (chunk := file.read(min(size, CHUNK_BYTES))):
            value, size = zlib.crc32(chunk, value), size - len(chunk)
    return value if size == 0 else -1
