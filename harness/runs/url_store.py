"""A store at an fsspec URL (s3://, gs://, file://, memory://), with errors that show what to do."""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec

from harness.errors import ConfigError, HarnessError
from harness.runs.fetch import remedy_for
from harness.runs.files import replacing

# Protocols with real folders, which must be created, and where a file is visible before it is complete. Object stores
# have neither, and some take "make this folder" for "make this bucket".
_WITH_FOLDERS = {"file", "local", "sftp", "ssh"}
# To remove an empty folder removes full ones there, or a file cannot take the place of another.
_REFUSED = {"hdfs", "arrow_hdfs", "webhdfs", "dbfs", "smb", "ftp"}
# Errors that the same command meets again. Others, as of a network, may pass.
_LASTING = (PermissionError, FileNotFoundError, ImportError, ValueError, NotImplementedError, NotADirectoryError)


class UrlStore:
    """A folder at an fsspec URL. Where the store refuses, methods raise ConfigError with a hint what to do, and where
    it fails, another HarnessError."""

    def __init__(self, url: str) -> None:
        """Finds the package for the protocol; does not connect."""
        self.where = url.rstrip("/")
        if refused := _REFUSED & {part.partition("://")[0].lower() for part in self.where.split("::")}:
            raise ConfigError(
                f"{refused.pop()}:// cannot keep a run: a start could lose files there", where=self.where,
                hint="use another store, such as s3://BUCKET/runs or sftp://HOST/runs, or a folder",
            )  # fmt: skip
        with _explaining(self.where):
            self._fs, path = fsspec.core.url_to_fs(self.where)
        self._path = path.rstrip("/")
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self.has_folders = bool(protocols & _WITH_FOLDERS)

    def sibling(self, name: str) -> UrlStore:
        """Return the folder ``name`` next to this one."""
        return UrlStore(f"{self.where.rpartition('/')[0]}/{name}")

    def files(self, unfinished: bool = False) -> dict[str, str]:
        """Return {name: a mark that changes with the content}. ``unfinished``: of the files that a start has not
        finished writing, or that its end left behind, instead."""
        if unfinished and not self.has_folders:
            return {}
        with _explaining(self.where):
            self._fs.invalidate_cache()
            try:
                details: dict[str, dict[str, Any]] = self._fs.find(self._path, detail=True)
            except FileNotFoundError:
                return {}
        start = f"{self._path}/"
        return {
            path.removeprefix(start): hashlib.sha256(repr(sorted(detail.items())).encode()).hexdigest()
            for path, detail in details.items()
            if detail.get("type") == "file"
            and path.startswith(start)
            and path.endswith(".part") == unfinished
            and ".." not in path.split("/")  # which an object may be named, but no file of a run
        }

    def read(self, name: str) -> str:
        with _explaining(self._url(name)):
            self._fs.invalidate_cache()
            try:
                text: bytes = self._fs.cat_file(self._path_of(name))
            except FileNotFoundError:
                return ""
        return text.decode("utf-8", errors="replace")

    def write(self, name: str, text: str) -> None:
        part = f".{secrets.token_hex(4)}.part"  # several machines may write it at the same time
        self._place(name, lambda path: self._fs.pipe_file(path, text.encode()), part)

    def get(self, name: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary, _explaining(self._url(name), absent=True):
            self._fs.get_file(self._path_of(name), str(temporary))

    def put(self, source: Path, name: str) -> None:
        source.stat()  # a FileNotFoundError about the store's side means something else
        self._place(name, lambda path: self._fs.put_file(str(source), path))

    def copy(self, name: str, target: UrlStore) -> None:
        """Copy a file to ``target``, inside the storage service if it can."""
        target._place(name, lambda path: self._copy(self._path_of(name), path))

    def _copy(self, path: str, target: str) -> None:
        try:
            self._fs.cp_file(path, target)
        except NotImplementedError:  # as over SFTP
            with self._fs.open(path, "rb") as file, self._fs.open(target, "wb") as copy:
                shutil.copyfileobj(file, copy, 1 << 22)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with _explaining(self._url(name)), suppress(FileNotFoundError):
                self._fs.rm_file(self._path_of(name))
            if self.has_folders:
                with suppress(Exception):  # not empty, in most cases
                    self._fs.rmdir(self._path_of(name).rpartition("/")[0])

    def _place(self, name: str, write: Callable[[str], object], part: str = ".part") -> None:
        """Call ``write`` with a path such that the file appears under its name only when it is complete."""
        final = self._path_of(name)
        with _explaining(self._url(name)):
            if not self.has_folders:
                write(final)
                return
            self._fs.makedirs(final.rpartition("/")[0], exist_ok=True)
            write(f"{final}{part}")
            self._fs.mv(f"{final}{part}", final)

    def _path_of(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _url(self, name: str) -> str:
        return f"{self.where}/{name}"


@contextmanager
def _explaining(url: str, absent: bool = False) -> Iterator[None]:
    """Turn any failure of any fsspec back end into a ConfigError if the same command will fail again, as without
    credentials, else into a HarnessError, after which a launcher may restart the run; a missing file stays one if
    ``absent``."""
    try:
        yield
    except HarnessError:
        raise
    except Exception as error:
        if absent and isinstance(error, FileNotFoundError):
            raise
        reason = str(error).strip().partition("\n")[0]
        name = type(error).__name__
        lasting = isinstance(error, _LASTING) or "redential" in f"{name} {error}"
        kind = ConfigError if lasting else HarnessError
        raise kind(f"{name}: {reason}", where=url, hint=remedy_for(url, error)) from error
