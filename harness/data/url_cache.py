"""The cache of this machine for files behind URLs:

CACHE/urls/ab/HASH          a complete copy; of an image, its modification time is about the last use
CACHE/urls/ab/HASH.used     the last use of an archive, whose index is for one modification time
CACHE/urls/ab/HASH.*.tmp    a download in progress, or one of a process that was killed

fsspec's own caches do not limit their size, and write a file under its final name, where other ranks read half of it.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import math
import os
import secrets
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from harness.data.vision import read_file
from harness.errors import DataError
from harness.runs import fetch
from harness.runs.files import write_atomically

_THREADS = 16  # downloads at once in a process
_USED_S = 3600.0  # between two records of the use of a copy
_UNUSED_S = 86400.0  # after which a copy may be removed
_ABANDONED_S = 3600.0  # after which a download without progress is one of a dead process
_FULL_S = 60.0  # after which the size of a full cache is measured again
_CHECKED_AFTER = 1 / 64  # of the limit: after so many new bytes, the size of the cache is measured again


class UrlCache:
    """Copies of files behind URLs below ``folder``, at most about ``max_bytes``. Safe in threads, processes and forks.

    A file that changes under the same URL is not noticed. When the cache is full, copies that no process has used for a
    day make room; if there are none, further files are read each time without a copy, so that a dataset larger than the
    cache keeps using the part that is in it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._pid = 0
        self._after_fork()

    def _after_fork(self) -> None:
        """Reset this object in a forked process: threads and their locks do not survive a fork. Nor does fsspec's event
        loop, but fsspec makes a new one for a file system that is made after the fork, as for each download."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._started: dict[str, Future[bytes]] = {}
        self._room = 0  # bytes until the size is measured again
        self._full_until = 0.0  # time.monotonic

    def __getstate__(self) -> tuple[Path, int]:
        return self.folder, self.max_bytes

    def __setstate__(self, state: tuple[Path, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def start(self, url: str) -> None:
        """Begin to download ``url`` unless there is a copy; ``read`` returns the result."""
        self._after_fork()
        if url not in self._started and not self._copy(url).exists():
            self._started[url] = self._submit(url)

    def read(self, url: str) -> torch.Tensor:
        """Return the bytes of ``url``, uint8 (bytes,). Raises FileNotFoundError if there is no such file, DataError if
        it cannot be asked for."""
        self._after_fork()
        future = self._started.pop(url, None)  # which else keeps the content in memory
        copy = self._copy(url)
        with suppress(FileNotFoundError):
            if time.time() - copy.stat().st_mtime > _USED_S:
                with suppress(OSError):  # it is another user's
                    os.utime(copy)
            return read_file(str(copy))
        content = self._result(url, future or self._submit(url))
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)

    def file(self, url: str) -> str:
        """Return the path of a copy of ``url``, an archive. Raises like ``read``, and DataError if the cache has no
        space."""
        self._after_fork()

        def accept(size: int) -> None:
            if not self._reserve(size):
                limit = f"{self.max_bytes / 2**30:.1f} GiB"
                raise DataError(
                    f"the cache of {limit} has no space for this archive of {size / 2**30:.1f} GiB",
                    where=url,
                    hint="raise task.cache_gib; members of an archive behind a URL are read from a local copy",
                )

        copy = fetch.fetched(url, self._copy(url), accept=accept)
        if _age_s(_mark(copy)) > _USED_S:
            with suppress(OSError):  # it is another user's
                _mark(copy).touch()
        return str(copy)

    def _copy(self, url: str) -> Path:
        name = hashlib.sha256(url.encode()).hexdigest()[:40]
        return self.folder / name[:2] / name

    def _submit(self, url: str) -> Future[bytes]:
        self._pool = self._pool or ThreadPoolExecutor(_THREADS, thread_name_prefix="url")
        return self._pool.submit(self._downloaded, url)

    def _result(self, url: str, future: Future[bytes]) -> bytes:
        try:
            content: bytes = future.result(timeout=2 * fetch.ATTEMPTS * fetch.TIMEOUT_S)
            return content
        except concurrent.futures.TimeoutError as error:  # of a file system that does not obey the limit itself
            raise fetch.unreachable(url, error) from None

    def _downloaded(self, url: str) -> bytes:
        """Return the content of ``url``, of which a copy is kept if there is space."""

        def get() -> bytes:
            import fsspec  # late: few need it, and its import takes long

            filesystem, path = fsspec.core.url_to_fs(url)
            limit = {"timeout": fetch.TIMEOUT_S} if filesystem.async_impl else {}
            content: bytes = filesystem.cat_file(path, **limit)
            return content

        content = fetch.attempted(url, get)
        if self._reserve(len(content)):
            copy = self._copy(url)
            with fetch.writing(copy):
                write_atomically(copy, content, secrets.token_hex(8))
        return content

    def _reserve(self, num_bytes: int) -> bool:
        """Reserve space for a copy of this size, which the caller then keeps; return False if there is none. Measuring
        the cache lists all its files, so this is done once for ``_room`` bytes, and if it is full, once a minute."""
        with self._lock:
            if num_bytes > self._room and time.monotonic() > self._full_until:
                free = self.max_bytes - self._make_room(num_bytes)
                self._room = min(free, max(num_bytes, int(self.max_bytes * _CHECKED_AFTER)))
            if num_bytes > self._room:
                if time.monotonic() > self._full_until:
                    self._full_until = time.monotonic() + _FULL_S
                return False
            self._room -= num_bytes
            return True

    def _make_room(self, num_bytes: int) -> int:
        """Remove old copies to make room for ``num_bytes`` more bytes; return how many bytes are left in the cache."""
        now = time.time()
        files: list[tuple[float, int, Path]] = []
        total = 0
        for file in self.folder.glob("??/*"):
            with suppress(OSError):
                stat = file.stat()
                if file.suffix == ".tmp" and now - stat.st_mtime > _ABANDONED_S:
                    file.unlink()
                elif file.is_file():
                    total += stat.st_size
                    files.append((stat.st_mtime, stat.st_size, file))
        for used_at, size, file in sorted(files):
            if total + num_bytes <= self.max_bytes or now - used_at < _UNUSED_S:
                break
            if _age_s(_mark(file)) > _UNUSED_S:
                with suppress(OSError):
                    file.unlink()
                    total -= size
        return total


def _mark(archive: Path) -> Path:
    return archive.with_name(f"{archive.name}.used")


def _age_s(file: Path) -> float:
    """Return the seconds since ``file`` was modified, infinite if it does not exist."""
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return math.inf
