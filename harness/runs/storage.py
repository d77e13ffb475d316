"""Stores of files: a local folder, or a folder at an fsspec URL (s3://, gs://, file://, memory://).

A store reads and writes files by name, such as "checkpoints/step-8/state.pt"; a file is there completely or not at all.
``copy_run`` copies between two stores in the order that keeps the target resumable.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.callbacks import Callback
from fsspec.registry import known_implementations

from harness.errors import ConfigError, HarnessError
from harness.runs import layout
from harness.runs.files import default_cache_dir, replacing, write_atomically

# Protocols with real folders, which must be created, and where a file is visible before it is complete. Object stores
# have neither, and some take "make this folder" for "make this bucket".
_WITH_FOLDERS = {"file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "arrow_hdfs", "webhdfs", "dbfs"}
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}

Progress = Callable[[], None]  # called while a transfer advances: a slow store differs from a dead one


def _ignore() -> None:
    pass


class Store(Protocol):
    where: str
    """Path or URL, for messages."""

    def files(self) -> dict[str, str]:
        """{name: a mark that changes with the content} of all files."""

    def read(self, name: str) -> str:
        """The text of a small file; empty if there is none."""

    def write(self, name: str, text: str) -> None:
        """Replace a small file."""

    def get(self, name: str, target: Path, progress: Progress = _ignore) -> None:
        """Copy a file to the local path ``target``. Raises FileNotFoundError if it does not exist."""

    def put(self, source: Path, name: str, progress: Progress = _ignore) -> None:
        """Copy the local file ``source`` into the store. Raises FileNotFoundError if it does not exist."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files in the given order; those that do not exist are skipped."""


def copy_run(
    source: Store,
    target: Store,
    files: Mapping[str, str],
    pointers: Mapping[str, str] | None = None,
    copied: dict[str, str] | None = None,
    progress: Progress = _ignore,
    problem: Callable[[str], str] = lambda step: "",
) -> None:
    """Copy ``files`` ({name: mark}) such that ``target`` can be resumed from, wherever the copy is interrupted.

    Small files go first: the log must be at least as long as a checkpoint expects. Then each checkpoint's state and its
    manifest, which makes the checkpoint valid. Last come the ``pointers`` ({"latest": "step-8"}), unless ``problem``
    finds something wrong with the copy of the checkpoint they name.

    ``copied`` remembers the marks of what arrived: unchanged files are not copied again. One store must be local.
    """
    copied = {} if copied is None else copied
    for name in sorted(files, key=_order):
        if copied.get(name) == files[name]:
            continue
        with suppress(FileNotFoundError):  # removed since it was listed
            if isinstance(source, LocalStore):
                target.put(source.folder / name, name, progress)
            else:
                assert isinstance(target, LocalStore)
                source.get(name, target.folder / name, progress)
            copied[name] = files[name]
        progress()
    for pointer, step in (pointers or {}).items():
        name = f"{layout.CHECKPOINTS}/{pointer}"
        if copied.get(name) != step and not problem(step):
            target.write(name, step + "\n")
            copied[name] = step


def _order(name: str) -> tuple[int, str]:
    last = (layout.STATE, layout.MANIFEST)
    file = name.rpartition("/")[2]
    return (last.index(file) + 1 if file in last else 0), name


class LocalStore:
    """A folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.where = folder, str(folder)

    def files(self) -> dict[str, str]:
        found = {}
        for folder, _, names in os.walk(self.folder):
            for path in (Path(folder, name) for name in names):
                name = path.relative_to(self.folder).as_posix()
                with suppress(FileNotFoundError):
                    if not path.is_symlink() and ".tmp" not in {part[-4:] for part in name.split("/")}:
                        stat = path.stat()
                        found[name] = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
        return found

    def read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / name, text)

    def get(self, name: str, target: Path, progress: Progress = _ignore) -> None:
        LocalStore(target.parent).put(self.folder / name, target.name, progress)

    def put(self, source: Path, name: str, progress: Progress = _ignore) -> None:
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(source, "rb") as file, replacing(target) as temporary, open(temporary, "wb") as copy:
            shutil.copyfileobj(file, copy)
        progress()

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)


class UrlStore:
    """A folder at an fsspec URL. Where the store refuses, methods raise ConfigError with a hint what to do."""

    def __init__(self, url: str) -> None:
        """Finds the package for the protocol; does not connect."""
        self.where = url.rstrip("/")
        with _explaining(self.where):
            self._fs, path = fsspec.core.url_to_fs(self.where)
        self._path = path.rstrip("/")
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self.has_folders = bool(protocols & _WITH_FOLDERS)

    def sibling(self, name: str) -> UrlStore:
        """The folder ``name`` next to this one."""
        return UrlStore(f"{self.where.rpartition('/')[0]}/{name}")

    def files(self) -> dict[str, str]:
        with _explaining(self.where):
            self._fs.invalidate_cache()
            try:
                found: dict[str, dict[str, Any]] = self._fs.find(self._path, detail=True)
            except FileNotFoundError:
                return {}
        start = f"{self._path}/"
        return {
            path.removeprefix(start): hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
            for path, facts in found.items()
            if facts.get("type") == "file" and path.startswith(start) and not path.endswith(".part")
        }

    def read(self, name: str) -> str:
        with _explaining(self._url(name)):
            self._fs.invalidate_cache()
            try:
                text: bytes = self._fs.cat_file(self._at(name))
            except FileNotFoundError:
                return ""
        return text.decode("utf-8", errors="replace")

    def write(self, name: str, text: str) -> None:
        self._place(name, lambda path: self._fs.pipe_file(path, text.encode()))

    def get(self, name: str, target: Path, progress: Progress = _ignore) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary, _explaining(self._url(name), absent=True):
            self._fs.get_file(self._at(name), str(temporary), callback=_reporting(progress))

    def put(self, source: Path, name: str, progress: Progress = _ignore) -> None:
        source.stat()  # a FileNotFoundError about the store's side means something else
        self._place(name, lambda path: self._fs.put_file(str(source), path, callback=_reporting(progress)))
        progress()

    def copy(self, name: str, other: UrlStore) -> None:
        """Copy a file to ``other``, inside the storage service."""
        other._place(name, lambda path: self._fs.cp_file(self._at(name), path))

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with _explaining(self._url(name)), suppress(FileNotFoundError):
                self._fs.rm_file(self._at(name))
            if self.has_folders:
                with suppress(Exception):  # not empty, in most cases
                    self._fs.rmdir(self._at(name).rpartition("/")[0])

    def _place(self, name: str, write: Callable[[str], object]) -> None:
        """Call ``write`` with a path such that the file appears under its name only when it is complete."""
        final = self._at(name)
        with _explaining(self._url(name)):
            if not self.has_folders:
                write(final)
                return
            self._fs.makedirs(final.rpartition("/")[0], exist_ok=True)
            write(f"{final}.part")
            self._fs.mv(f"{final}.part", final)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _url(self, name: str) -> str:
        return f"{self.where}/{name}"


def _reporting(progress: Progress) -> Callback:
    return Callback(hooks={"progress": lambda *_, **__: progress()})


def working_folder(url: str, cache_dir: str | None, purpose: str = "") -> Path:
    """The local folder for the run or checkpoint at ``url``; its parent belongs to it alone. ``cache_dir`` is the
    setting of that name; ``purpose`` separates copies that are only read."""
    name, key = url.rstrip("/").rpartition("/")[2], hashlib.sha256(url.encode()).hexdigest()[:16]
    cache = Path(cache_dir or default_cache_dir()).expanduser().absolute()
    return cache / "runs" / purpose / f"{name}-{key}" / name


@contextmanager
def _explaining(url: str, absent: bool = False) -> Iterator[None]:
    """Turn any failure of any fsspec back end into a ConfigError; a missing file stays one if ``absent``."""
    try:
        yield
    except HarnessError:
        raise
    except Exception as error:
        if absent and isinstance(error, FileNotFoundError):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{type(error).__name__}: {reason}", where=url, hint=_remedy(url, error)) from error


def _remedy(url: str, error: Exception) -> str:
    protocol = url.partition("://")[0]
    if isinstance(error, ImportError):
        known = known_implementations.get(protocol, {}).get("err", f"the package for {protocol}:// is missing")
        return f"pip install {_PACKAGES[protocol]}" if protocol in _PACKAGES else str(known)
    if isinstance(error, ValueError) and protocol not in fsspec.available_protocols():
        return "use a folder, or a URL such as s3://BUCKET/runs; fsspec supports s3, gs, abfs, sftp, file and others"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there, or in the cache (APEX_HARNESS_CACHE, data.cache_dir)"
    if isinstance(error, NotImplementedError):
        return f"{protocol}:// is read-only; use a store that can be written, such as s3://BUCKET/runs"
    if isinstance(error, FileNotFoundError):
        return "check that the bucket exists and that you may access it; create it, or correct the address"
    if isinstance(error, PermissionError) or "redential" in f"{type(error).__name__} {error}":
        keys = ", such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" if protocol in ("s3", "s3a") else ""
        return f"give every node credentials{keys} that may list, read, write and delete there"
    other = "; for another S3 server, set AWS_ENDPOINT_URL" if protocol in ("s3", "s3a") else ""
    return f"check the address and the network{other}"
