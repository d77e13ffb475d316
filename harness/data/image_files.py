"""The bytes of images: files below a folder, members of tar archives, and both behind fsspec URLs.

A path is relative to the root. ``shards/train-000000.tar/cat.jpg`` is the member ``cat.jpg`` of an archive. The root
or a path may be a URL; what it names is copied once to the cache of this machine:

    CACHE/urls/ab/HASH          a complete copy; its modification time is about the last use
    CACHE/urls/ab/HASH.*.tmp    a download in progress, or one of a process that was killed
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import secrets
import threading
import time
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch

from harness.config.places import is_url
from harness.data.vision import read_file
from harness.errors import DataError, require_regular_file
from harness.runs import fetch
from harness.runs.files import cache_folder, write_atomically

_TAR = ".tar/"
_ARCHIVES_AT_ONCE = 4
THREADS = 16  # downloads at once in a process
_USED_S = 3600.0  # between two records of the use of a copy
_UNUSED_S = 86400.0  # after which a copy may be removed
_ABANDONED_S = 3600.0  # after which a download without progress is one of a dead process
_FULL_S = 60.0  # after which the size of a full cache is measured again
_CHECKED_AFTER = 1 / 64  # of the limit: after so many new bytes, the size of the cache is measured again


@dataclass
class ImageFiles:
    """Files below ``root``, a folder or a URL. ``cache_gib``: for the local copies of files behind URLs."""

    root: str
    cache_dir: Path | None = None
    cache_gib: float = 50.0
    _cache: Path = field(init=False, repr=False)
    _urls: UrlCache = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.root = self.root.removeprefix("file://")
        self._cache = cache_folder(self.cache_dir)
        self._urls = UrlCache(self._cache / "urls", int(self.cache_gib * 2**30))

    def locate(self, path: str) -> str:
        """Return the file or URL that ``path`` names."""
        if is_url(path):
            return path.removeprefix("file://")
        if not is_url(self.root):
            return os.path.join(self.root, path)
        if self.root.startswith(("http://", "https://")):  # where #, ? and % in the name of a file mean something else
            file, tar, member = path.partition(_TAR)
            path = urllib.parse.quote(file) + tar + member
        return f"{self.root.rstrip('/')}/{path}"

    def is_file(self, path: str) -> bool:
        """Return True if ``path`` names a local file, not a member of an archive or something behind a URL."""
        return _TAR not in path and not is_url(self.locate(path))

    def is_below(self, folder: str, path: str) -> bool:
        """Return True if ``path`` would be a file if ``folder`` were the root."""
        return replace(self, root=folder).exists(path) and not is_url(path)

    def read(self, path: str) -> torch.Tensor:
        """Return the bytes of ``path``, uint8 (bytes,). Raises OSError or RuntimeError if this file or member cannot be
        read, and DataError if the archive or the server cannot."""
        location = self.locate(path)
        if _TAR in path:
            return self._member(location)
        if is_url(location):
            return self._urls.read(location)
        require_regular_file(location)
        return read_file(location)

    def read_ahead(self, paths: Sequence[str]) -> None:
        """Download what ``paths`` name behind URLs, in threads; do not wait for it."""
        for location in map(self.locate, paths):
            if is_url(location) and _TAR not in location:
                self._urls.start(location)

    def archives(self, paths: pa.ChunkedArray) -> set[str]:
        """Return the archives behind URLs of which ``paths`` name members."""
        inside = paths.filter(pc.match_substring(paths, _TAR))
        paths_of_archives = pc.unique(pc.replace_substring_regex(inside, r"(?s)\.tar/.*", ".tar")).to_pylist()
        return {location for location in map(self.locate, paths_of_archives) if is_url(location)}

    def copy_archives(self, urls: Sequence[str]) -> None:
        """Copy archives to the cache of this machine. Raises DataError; one that does not exist is left to ``read``."""

        def copied(url: str) -> None:
            with suppress(FileNotFoundError):
                self._urls.file(url)

        with ThreadPoolExecutor(_ARCHIVES_AT_ONCE, thread_name_prefix="archives") as pool:
            list(pool.map(copied, urls))

    def exists(self, path: str) -> bool:
        """Return False if the file does not exist. Of an archive, only the file itself is looked for; URLs are not
        asked."""
        location = self.locate(path)
        file = location.partition(_TAR)[0] + ".tar" if _TAR in location else location
        return is_url(location) or os.path.exists(file)

    def _member(self, location: str) -> torch.Tensor:
        """Return the bytes of ``location``, ARCHIVE.tar/MEMBER; of a file, if the archive is in truth a folder."""
        archive, _, member = location.partition(_TAR)
        archive += ".tar"
        if not is_url(archive) and os.path.isdir(archive):  # a folder whose name ends like an archive's
            require_regular_file(location)
            return read_file(location)
        file = self._urls.file(archive) if is_url(archive) else archive
        from harness.data import tars  # late: few datasets are in archives

        return tars.read(file, member, self._cache / "tars", archive)


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
        if url in self._started or self._copy(url).exists():
            return
        self._pool = self._pool or ThreadPoolExecutor(THREADS, thread_name_prefix="url")
        self._started[url] = self._pool.submit(self._downloaded, url)

    def read(self, url: str) -> torch.Tensor:
        """Return the bytes of ``url``, uint8 (bytes,). Raises FileNotFoundError if there is no such file, DataError if
        it cannot be asked for."""
        copy = self._copy(url)
        with suppress(FileNotFoundError):
            now, used_at = time.time(), os.stat(copy).st_mtime
            if now - used_at > _USED_S:
                os.utime(copy)
            return read_file(str(copy))
        self.start(url)
        future = self._started.pop(url, None)
        content = self._result(url, future) if future else self._downloaded(url)
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

        return str(fetch.fetched(url, self._copy(url), accept=accept))

    def _copy(self, url: str) -> Path:
        name = hashlib.sha256(url.encode()).hexdigest()[:40]
        return self.folder / name[:2] / name

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
        """Reserve space for a copy of this size, which the caller then keeps; return False if there is none."""
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
        now, files, total = time.time(), [], 0
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
            with suppress(OSError):
                file.unlink()
                total -= size
        return total
