"""Local copies of files behind fsspec URLs, shared by all processes of a machine.

    CACHE/urls/ab/HASH          a complete copy; its modification time is about the last use
    CACHE/urls/ab/HASH.*.tmp    a download in progress, or one of a process that was killed

A URL is downloaded once: a file that changes under the same URL is not noticed. When the cache is full, copies that no
process has used for a day make room; if there are none, further files are read each time without a copy, so that
a dataset larger than the cache keeps using the part that is in it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import torch

from harness.data.download import locked
from harness.data.vision import read_file
from harness.distributed.threads import thread
from harness.errors import DataError, reason, remedy
from harness.runs.files import commit
from harness.runs.url_store import remedy_for

log = logging.getLogger("harness")

THREADS = 16  # downloads at once in a process
TIMEOUT_S = 30.0  # of an attempt to read a file; for archives, without any progress
ATTEMPTS = 3
_PAUSE_S = 0.5  # before the second attempt; twice as long before each further one
_USED_S = 3600.0  # between two records of the use of a copy
_UNUSED_S = 86400.0  # after which a copy may be removed
_ABANDONED_S = 3600.0  # after which a download without progress is one of a dead process
_FULL_S = 60.0  # after which the size of a full cache is measured again
_CHECKED_AFTER = 1 / 64  # of the limit: after so many new bytes, the size of the cache is measured again


class UrlCache:
    """Copies below ``folder``, at most about ``max_bytes``. Safe in threads, processes and forks."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._pid = 0
        self._after_fork()

    def _after_fork(self) -> None:
        """Reset this object in a forked process: threads and their locks do not survive a fork. Nor does fsspec's event
        loop, but fsspec makes a new one for a file system that is made after the fork, as ``_attempted`` does."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._started: dict[str, Future] = {}
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
        """The bytes of ``url``, uint8 (bytes,). Raises FileNotFoundError if there is no such file, DataError if it
        cannot be asked for."""
        copy = self._copy(url)
        with suppress(FileNotFoundError):
            now, used = time.time(), os.stat(copy).st_mtime
            if now - used > _USED_S:
                os.utime(copy)
            return read_file(str(copy))
        self.start(url)
        future = self._started.pop(url, None)
        content = self._result(url, future) if future else self._downloaded(url)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)

    def file(self, url: str) -> str:
        """The path of a copy of ``url``, an archive. Raises like ``read``, and DataError if the cache has no space."""
        self._after_fork()
        copy = self._copy(url)
        if not copy.exists():
            # Outside of the lock, which takes any OSError for one of its own.
            size = int(_attempted(url, lambda filesystem, path: filesystem.info(path)).get("size") or 0)
            with locked(copy.with_name(f"{copy.name}.archive")):  # all workers want it at about the same time
                if not copy.exists():
                    log.info("copying %s (%.2f GiB) to the cache", url, size / 2**30)
                    self._download_file(url, copy, size)
        return str(copy)

    def _copy(self, url: str) -> Path:
        name = hashlib.sha256(url.encode()).hexdigest()[:40]
        return self.folder / name[:2] / name

    def _result(self, url: str, future: Future) -> bytes:
        try:
            content: bytes = future.result(timeout=ATTEMPTS * (TIMEOUT_S + 2 * _PAUSE_S))
            return content
        except TimeoutError as error:  # of a file system that does not obey the limit itself
            raise unreachable(url, error) from None

    def _downloaded(self, url: str) -> bytes:
        """The content of ``url``, of which a copy is kept if there is space."""

        def get(filesystem: Any, path: str) -> bytes:
            limit = {"timeout": TIMEOUT_S} if filesystem.async_impl else {}
            content: bytes = filesystem.cat_file(path, **limit)
            return content

        content = _attempted(url, get)
        if self._has_room(len(content)):
            with self._keeping(self._copy(url)) as temporary:
                temporary.write_bytes(content)
        return content

    def _download_file(self, url: str, copy: Path, size: int) -> None:
        if not self._has_room(size):
            limit = f"{self.max_bytes / 2**30:.1f} GiB"
            raise DataError(
                f"the cache of {limit} has no space for this archive of {size / 2**30:.1f} GiB",
                where=url,
                hint="raise task.cache_gib; members of an archive behind a URL are read from a local copy",
            )
        with self._keeping(copy) as temporary:
            _attempted(url, lambda filesystem, path: _with_progress(filesystem, path, temporary))
            if size and temporary.stat().st_size != size:
                hint = "start again once the upload of the archive is complete"
                raise DataError("the archive changed during the download", where=url, hint=hint)

    @contextmanager
    def _keeping(self, copy: Path) -> Iterator[Path]:
        """Yield a temporary path, of which the file is put in place of ``copy`` at the end."""
        temporary = copy.with_name(f"{copy.name}.{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            commit(temporary, copy)
        except FileNotFoundError:
            raise
        except OSError as error:
            hint = remedy(error, "or set data.cache_dir to a folder on a local disk with space")
            raise DataError(f"the cache cannot be written: {reason(error)}", where=str(copy), hint=hint) from None
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _has_room(self, num_bytes: int) -> bool:
        """True if a copy of this size may be kept, which the caller then does."""
        with self._lock:
            if num_bytes > self._room and time.monotonic() > self._full_until:
                free = self.max_bytes - self._measured(num_bytes)
                self._room = min(free, max(num_bytes, int(self.max_bytes * _CHECKED_AFTER)))
            if num_bytes > self._room:
                if time.monotonic() > self._full_until:
                    self._full_until = time.monotonic() + _FULL_S
                return False
            self._room -= num_bytes
            return True

    def _measured(self, wanted: int) -> int:
        """Bytes in the cache, after old copies have made room for ``wanted`` more."""
        now, found, total = time.time(), [], 0
        for file in self.folder.glob("??/*"):
            with suppress(OSError):
                stat = file.stat()
                if file.suffix == ".tmp" and now - stat.st_mtime > _ABANDONED_S:
                    file.unlink()
                elif file.is_file():
                    total += stat.st_size
                    found.append((stat.st_mtime, stat.st_size, file))
        for used, size, file in sorted(found):
            if total + wanted <= self.max_bytes or now - used < _UNUSED_S:
                break
            with suppress(OSError):
                file.unlink()
                total -= size
        return total


def _attempted(url: str, work: Callable[[Any, str], Any]) -> Any:
    """``work(filesystem, path)``, repeated if the server or the network fails. Raises FileNotFoundError, DataError."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_S * 2 ** (attempt - 1))
        try:
            filesystem, path = fsspec.core.url_to_fs(url)
            return work(filesystem, path)
        except (FileNotFoundError, DataError):
            raise
        except (PermissionError, ImportError, ValueError, NotImplementedError) as error:
            raise unreachable(url, error) from None
        except Exception as error:  # of any back end
            failure = error
            if "redential" in type(error).__name__:
                break
    raise unreachable(url, failure) from None


def _with_progress(filesystem: Any, path: str, target: Path) -> None:
    """Download ``path`` to ``target``. Raises TimeoutError after TIMEOUT_S without progress."""
    done = Future[None]()

    def get() -> None:
        try:
            filesystem.get_file(path, str(target))
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    thread(get, "url-archive").start()
    size, since = -1, time.monotonic()
    while True:
        with suppress(TimeoutError):
            return done.result(timeout=1.0)
        if done.done():
            continue
        now = target.stat().st_size if target.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > TIMEOUT_S:
            raise TimeoutError(f"no data for {TIMEOUT_S:g} s")


def unreachable(url: str, error: Exception) -> DataError:
    """The error for a URL whose server, network or credentials fail, for which no row of the data is to blame."""
    name = type(error).__name__
    what = f"no answer within {TIMEOUT_S:g} s" if "Timeout" in name else f"{name}: {reason(error)}"
    return DataError(f"{url} cannot be read: {what}", hint=remedy_for(url, error, "read"))
