"""Exclusive locks between processes, also of several machines that share a disk.

A lock is the kernel's (flock) on the inode of a file or folder, so that it is one lock under all names, and free at
once when its owner dies. Where a file system has no flock, as on some mounts of Lustre and FUSE, a marker file that
names its owner takes its place.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from harness.errors import reason
from harness.runs.files import text_or_empty

log = logging.getLogger("harness")

FILE = ".lock"  # in a locked folder
MARKER_SUFFIX = ".held"
_POLL_S = 0.05
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}
_reported: set[Path] = set()  # folders without locks


class Lock:
    """A lock on a file, or on a folder, at ``path``. It excludes other processes, and other objects of this class.

    A child process that inherits ``descriptors`` keeps the lock until it ends.
    """

    def __init__(self, path: Path, is_folder: bool = False) -> None:
        """Missing files and folders are created when the lock is acquired."""
        self.path, self._is_folder = path, is_folder
        # A folder's own lock holds if somebody deletes the file; network file systems show other machines the file's.
        self._file = path / FILE if is_folder else path
        self._open: dict[Path, int] = {}
        self._marker: filelock.BaseFileLock | None = None
        self._marked = ""  # the content of the marker, which names this process

    @property
    def descriptors(self) -> list[int]:
        """The locked files, while the lock is held; empty on a file system without flock."""
        return list(self._open.values())

    @property
    def _marker_path(self) -> Path:
        return self._file.with_name(self._file.name + MARKER_SUFFIX)

    @property
    def owner(self) -> str:
        """The process that holds the lock, if a marker or the file in a locked folder names it; otherwise empty."""
        with suppress(ValueError):
            pid, host = text_or_empty(self._marker_path).split()[:2]
            return f"process {pid} on {host}; if it has ended, delete {self._marker_path}"
        with suppress(ValueError):
            pid, host = text_or_empty(self._file).split()[:2]
            return f"process {pid} on {host}" if self._is_folder else ""
        return ""

    def try_acquire(self) -> bool:
        """Take the lock and return True; False while another holds it. Raises OSError if the file cannot be opened."""
        try:
            if self._is_folder:
                self.path.mkdir(parents=True, exist_ok=True)
            acquired = (not self._is_folder or self._flock_folder()) and self._flock(self._file, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            self.release()
            if isinstance(error, FileNotFoundError) and self._is_folder:
                return False  # its owner has moved it just now
            if error.errno not in _NO_FLOCK:
                raise
            return self._mark(error)
        if not acquired:
            self.release()
        elif self._is_folder:
            with suppress(OSError):  # on a full disk it has no name
                os.ftruncate(self._open[self._file], 0)
                os.pwrite(self._open[self._file], f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        return acquired

    def acquire(self, timeout_s: float) -> bool:
        """Call ``try_acquire`` until it succeeds; return False after ``timeout_s``."""
        until = time.monotonic() + timeout_s
        while not self.try_acquire():
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return True

    def release(self) -> None:
        """Release the lock, if it is held."""
        while self._open:
            os.close(self._open.popitem()[1])
        if self._marker is not None:
            self._marker.release(force=True)
            self._marker = None

    def is_current(self) -> bool:
        """Return whether the lock is held, and ``path`` is still the file or folder that was locked."""
        if self._marker is not None:
            return self._marked != "" and self._marked == text_or_empty(self._marker_path)  # not another's, if moved
        return bool(self._open) and all(_is_same(path, descriptor) for path, descriptor in self._open.items())

    def _flock_folder(self) -> bool:
        try:
            return self._flock(self.path, os.O_RDONLY)
        except FileNotFoundError:
            raise
        except OSError:  # a folder that may not be read, or a file system that locks only files
            return True

    def _flock(self, path: Path, flags: int) -> bool:
        import fcntl  # late: Windows has none, and the command line says so

        descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The name may have been removed or given to another file since it was opened, as by an owner that leaves.
            if _is_same(path, descriptor):
                self._open[path] = descriptor
        except (BlockingIOError, PermissionError):  # the latter on CIFS
            pass
        finally:
            if path not in self._open:
                os.close(descriptor)
        return path in self._open

    def _mark(self, missing: OSError) -> bool:
        marker = self._marker_path
        if marker.parent not in _reported:
            _reported.add(marker.parent)
            problem = f"no locks on this file system ({reason(missing)})"
            log.warning("%s: %s; a file *%s names the process that uses it", marker.parent, problem, MARKER_SUFFIX)
        lock = filelock.SoftFileLock(marker, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return False
        self._marker, self._marked = lock, text_or_empty(marker)
        return True


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock on the file ``path``. Raises TimeoutError if another process holds it for ``timeout_s``, or
    another OSError if the file cannot be created."""
    lock = Lock(path)
    if not lock.acquire(timeout_s):
        raise TimeoutError(errno.ETIMEDOUT, f"another process still uses it ({lock.owner or path})", str(path))
    try:
        yield
    finally:
        lock.release()


def is_held(folder: Path) -> bool:
    """Return True if a process holds the lock on ``folder``, without changing anything; False if none does or if this
    machine cannot tell."""
    import fcntl

    with suppress(OSError), open(folder / FILE, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def forget_marker(folder: Path) -> None:
    """Remove this process's marker from ``folder``, which it locked under another name."""
    with suppress(OSError):
        (folder / (FILE + MARKER_SUFFIX)).unlink()


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
