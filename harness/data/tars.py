"""Tar archives of which any member can be read at once: an index of names, offsets and sizes, made once per archive.

The index is in CACHE/tars/NAME-HASH: its digest, then entries sorted by a hash of the member's name, mapped by every
process. An archive that has changed gets a new index, and so does one whose index is damaged.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import shlex
import tarfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from harness.errors import DataError, require_regular_file
from harness.runs.fetch import made_once
from harness.runs.files import write_atomically

log = logging.getLogger("harness")

_ENTRY = np.dtype([("hash", "<u8"), ("offset", "<i8"), ("size", "<i8")])
_DIGEST_BYTES = 32
_BLOCK = 512  # bytes, of the tar format
_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip"), b"BZh": ("bzip2", "bunzip2"), b"\xfd7zXZ": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}  # fmt: skip


def read(file: str, member: str, cache: Path, name: str) -> torch.Tensor:
    """Return the bytes of ``member`` of the archive ``file``, which messages call ``name``; uint8 (bytes,).

    Raises FileNotFoundError if the archive does not exist or has no such member, DataError if it is damaged or packed.
    """
    require_regular_file(file)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        index = _index(file, _version(os.fstat(descriptor)), cache, name)
        key = np.uint64(_hash(member.removeprefix("./")))  # NumPy would convert the index to float64 for an int
        position = int(np.searchsorted(index["hash"], key))
        if position == len(index) or index["hash"][position] != key:
            raise FileNotFoundError(errno.ENOENT, f"the archive {name} has no member {member}")
        size, offset = int(index["size"][position]), int(index["offset"][position])
        content = bytearray(size)
        part = memoryview(content)
        while part:  # Linux reads at most 2 GiB at once
            done = os.preadv(descriptor, [part], offset + size - len(part))
            if not done:
                raise OSError(errno.EIO, f"the archive {name} has become shorter")
            part = part[done:]
    finally:
        os.close(descriptor)
    return torch.frombuffer(content, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def members(file: str, name: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, offset, size) of each regular file in the archive, in order. Raises DataError."""
    with open(file, "rb") as stream:
        head = stream.read(6)
        for magic, (kind, command) in _PACKED.items():
            if head.startswith(magic):
                raise DataError(
                    f"the archive is compressed with {kind}, so its members cannot be read one by one",
                    where=name,
                    hint=f"decompress it: {command} {shlex.quote(name)} (images are compressed already)",
                )
        stream.seek(0)
        length = os.fstat(stream.fileno()).st_size
        try:
            with tarfile.open(fileobj=stream, mode="r:", errorlevel=0) as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]  # which grows otherwise
                    if member.offset_data + member.size > length and member.isreg():
                        raise _truncated(name, f"it ends inside {member.name}")
                    if member.isreg() and member.sparse is None:
                        yield member.name.removeprefix("./"), member.offset_data, member.size
                end = archive.offset
        except tarfile.TarError as error:
            if "end of data" in str(error) or "truncated" in str(error):
                raise _truncated(name, str(error)) from None
            hint = "check that it was written completely, and that it is a tar archive"
            raise DataError(f"this is not a tar archive: {error}", where=name, hint=hint) from None
        stream.seek(end)
        if stream.read(_BLOCK) != bytes(_BLOCK):
            raise _truncated(name, "it has no end marker")


def _truncated(name: str, reason: str) -> DataError:
    hint = f"copy it again; if only the marker is missing, add it: head -c 1024 /dev/zero >> {shlex.quote(name)}"
    return DataError(f"the archive is not complete ({reason})", where=name, hint=hint)


def _version(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


@lru_cache(maxsize=4096)  # archives; an index is a mapped file
def _index(file: str, version: tuple[int, ...], cache: Path, name: str) -> np.ndarray:
    """Return the index of the archive in this version, made first if no process has."""
    place = os.path.realpath(file)
    folder = cache / f"{Path(place).stem[:40]}-{hashlib.sha256(place.encode()).hexdigest()[:16]}"
    path = folder / f"{hashlib.sha256(repr(version).encode()).hexdigest()[:24]}.index"
    if (index := _load(path)) is None:
        with made_once(folder / "index", passes=(FileNotFoundError,)):
            if (index := _load(path)) is None:
                if path.exists():
                    log.warning("%s: the index of the archive in the cache is damaged; making it again", name)
                _write_index(file, path, name)
                index = _load(path)
    if index is None:
        hint = "set data.cache_dir to a folder on another disk, and run the same command again"
        raise DataError(f"the index of the archive is damaged as soon as it is written: {path}", where=name, hint=hint)
    return index


def _load(path: Path) -> np.ndarray | None:
    """Return the entries of an index; None if there is no such file, or it is not as it was written."""
    try:
        content = np.asarray(np.memmap(path, "u1", "r"))
    except (OSError, ValueError):  # the latter for an empty file
        return None
    digest, entries = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return entries.view(_ENTRY) if digest.tobytes() == _digest(entries) else None


def _digest(entries: np.ndarray) -> bytes:
    return hashlib.blake2b(entries.data, digest_size=_DIGEST_BYTES).digest()


def _write_index(file: str, path: Path, name: str) -> None:
    """Write the index of ``file``, and remove older ones. Raises DataError if two members have the same name."""
    entries = np.array([(_hash(member), offset, size) for member, offset, size in members(file, name)], dtype=_ENTRY)
    entries.sort(order="hash")
    if (twice := np.flatnonzero(np.diff(entries["hash"].view(np.int64)) == 0)).size:
        key = int(entries["hash"][twice[0]])
        duplicate = next(member for member, _, _ in members(file, name) if _hash(member) == key)
        hint = "give each sample a unique name"
        raise DataError(f"the archive has two members named {duplicate}", where=name, hint=hint)
    for old in path.parent.glob("*.index"):
        if old != path:
            old.unlink(missing_ok=True)
    # Machines that share the cache may not see the lock.
    write_atomically(path, _digest(entries) + entries.tobytes(), secrets.token_hex(8))


def _hash(member: str) -> int:
    return int.from_bytes(hashlib.blake2b(member.encode(errors="surrogateescape"), digest_size=8).digest(), "little")
