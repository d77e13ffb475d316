"""Files of a job on the disk of a Dask worker, as its client asks for them: listed, read and written in chunks.

Asked beside the tasks. What they mean at home is the business of ``dask_home``.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from contextlib import suppress
from pathlib import Path

from harness.engines import dask_rank

CHUNK_BYTES = 8 << 20

Listing = dict[str, tuple[int, int, int]]  # {path in the folder: (bytes, time of change in ns, inode)}


async def listing(job: str, folder: str) -> Listing:
    """The files below ``folder`` (relative to the job's own), without those that are being written."""
    return await asyncio.to_thread(_listing, dask_rank.scratch_of(job) / folder)


async def read(job: str, name: str, offset: int, known: int | None) -> tuple[bytes, bool, int]:
    """(bytes from ``offset`` on, whether that was the rest, inode) of a file; ``known``: the inode that the call before
    told, if this goes on after one. Raises FileNotFoundError where the file is gone, or was replaced since."""
    return await asyncio.to_thread(_read, dask_rank.scratch_of(job) / name, offset, known)


async def grown(job: str, name: str, size: int, checksum: int) -> bool:
    """Whether the first ``size`` bytes of the file have the CRC-32 ``checksum``."""
    return checksum == await asyncio.to_thread(crc_of, dask_rank.scratch_of(job) / name, size)


async def write(job: str, name: str, offset: int, content: bytes) -> None:
    """``content`` at ``offset`` of the file, which ends there."""
    await asyncio.to_thread(_write, dask_rank.scratch_of(job) / name, offset, content)


def _listing(folder: Path) -> Listing:
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        with suppress(OSError):
            if not any(part.endswith(".tmp") for part in name.parts) and path.is_file():
                stat = path.stat()
                found[name.as_posix()] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return found


def _read(path: Path, offset: int, known: int | None) -> tuple[bytes, bool, int]:
    with open(path, "rb") as file:
        inode = os.fstat(file.fileno()).st_ino
        if known not in (None, inode):
            raise FileNotFoundError(f"{path} was replaced")
        file.seek(offset)
        content = file.read(CHUNK_BYTES)
        return content, not file.read(1), inode


def _write(path: Path, offset: int, content: bytes) -> None:
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
