"""A folder at an fsspec URL (s3://, gs://, file://, memory://): its files by name, each there whole or not at all.

Which files make a run, and in which order they come and go, is the business of ``harness.runs.remote``.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import Callback
from fsspec.registry import known_implementations

from harness.errors import ConfigError, HarnessError
from harness.runs.files import default_cache_dir, replacing

# Protocols with real folders: those must be made, and a file appears there before it is whole. Object stores have
# neither, and some take "make this folder" for "make this bucket".
_WITH_FOLDERS = {"file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "arrow_hdfs", "webhdfs", "dbfs"}
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


def working_folder(url: str, cache_dir: str | None, purpose: str = "") -> Path:
    """Where this machine has the run or checkpoint at ``url``, alone in a folder of its own; ``cache_dir``: the setting
    of that name. ``purpose``: of a copy that is only read."""
    name, key = url.rstrip("/").rpartition("/")[2], hashlib.sha256(url.encode()).hexdigest()[:16]
    cache = Path(cache_dir or default_cache_dir()).expanduser().absolute()
    return cache / "runs" / purpose / f"{name}-{key}" / name


class UrlFolder:
    """``url`` and all below it. Every method raises ConfigError, saying what to type, where the store refuses."""

    def __init__(self, url: str) -> None:
        """Finds the package that knows the protocol; asks the store nothing."""
        self.url = url.rstrip("/")
        with _asking(self.url):
            self._fs, path = fsspec.core.url_to_fs(self.url)
        self._path = path.rstrip("/")
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._has_folders = bool(protocols & _WITH_FOLDERS)

    def __str__(self) -> str:
        return self.url

    def beside(self, name: str) -> UrlFolder:
        """The folder ``name`` in the folder that this one is in."""
        return UrlFolder(f"{self.url.rpartition('/')[0]}/{name}")

    def sizes(self) -> dict[str, int]:
        """{name relative to the folder, with slashes: bytes} of all files; empty where there is nothing."""
        with _asking(self.url):
            self._fs.invalidate_cache()
            try:
                found: dict[str, dict[str, Any]] = self._fs.find(self._path, detail=True)
            except FileNotFoundError:
                return {}
        start = f"{self._path}/"
        return {
            name.removeprefix(start): int(info.get("size") or 0)
            for name, info in found.items()
            if info.get("type") == "file" and name.startswith(start) and not name.endswith(".part")
        }

    def mark(self, name: str) -> str:
        """What changes when the file does."""
        with _asking(self._url(name)):
            return str(self._fs.ukey(self._at(name)))

    def read(self, name: str) -> str | None:
        """The text of a small file; None if there is none."""
        with _asking(self._url(name)):
            self._fs.invalidate_cache()
            try:
                text: bytes = self._fs.cat_file(self._at(name))
            except FileNotFoundError:
                return None
        return text.decode("utf-8", errors="replace")

    def write(self, name: str, text: str) -> None:
        """``text`` as a small file."""
        self._place(name, lambda path: self._fs.pipe_file(path, text.encode()))

    def put(self, source: Path, name: str, moved: Callable[[], None] = lambda: None) -> None:
        """Upload the file ``source``; ``moved`` is called as it gets on."""
        self._place(name, lambda path: self._fs.put_file(str(source), path, callback=_Moved(moved)))
        moved()

    def get(self, name: str, target: Path) -> None:
        """Download into ``target``. Raises ConfigError where there is no such file."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary, _asking(self._url(name)):
            self._fs.get_file(self._at(name), str(temporary))

    def copy(self, name: str, other: UrlFolder) -> None:
        """The file ``name`` also in ``other``, of the same store, which copies it by itself."""
        other._place(name, lambda path: self._fs.cp_file(self._at(name), path))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, in this order; one that is not there is none the less gone."""
        for name in names:
            with _asking(self._url(name)), suppress(FileNotFoundError):
                self._fs.rm_file(self._at(name))
            if self._has_folders:
                with suppress(Exception):  # not empty, in most cases
                    self._fs.rmdir(self._at(name).rpartition("/")[0])

    def _place(self, name: str, write: Callable[[str], object]) -> None:
        """Have ``write`` make the file, so that it appears under its name when it is whole."""
        final = self._at(name)
        with _asking(self._url(name)):
            if not self._has_folders:
                write(final)
                return
            self._fs.makedirs(final.rpartition("/")[0], exist_ok=True)
            write(f"{final}.part")
            self._fs.mv(f"{final}.part", final)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _url(self, name: str) -> str:
        return f"{self.url}/{name}"


class _Moved(Callback):
    """fsspec's report of progress, for who only wants to know that there is some."""

    def __init__(self, moved: Callable[[], None]) -> None:
        super().__init__()
        self._moved = moved

    def relative_update(self, inc: int = 1) -> None:
        self._moved()

    def absolute_update(self, value: int) -> None:
        self._moved()


@contextmanager
def _asking(url: str) -> Iterator[None]:
    """Any failure of any of fsspec's many back ends as a ConfigError, but for files that are not there, which are
    so only for whoever writes."""
    try:
        yield
    except HarnessError:
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{type(error).__name__}: {said}", where=url, hint=_remedy(url, error)) from error


def _remedy(url: str, error: Exception) -> str:
    protocol = url.partition("://")[0]
    if isinstance(error, ImportError):
        known = known_implementations.get(protocol, {}).get("err", f"the package for {protocol}:// is missing")
        return f"pip install {_PACKAGES[protocol]}" if protocol in _PACKAGES else str(known)
    if isinstance(error, ValueError) and protocol not in fsspec.available_protocols():
        return "use a folder, or a URL such as s3://BUCKET/runs; fsspec knows s3, gs, abfs, sftp, file and others"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there, or in the cache (APEX_HARNESS_CACHE, data.cache_dir)"
    if isinstance(error, NotImplementedError):
        return f"{protocol}:// can only be read; use a store that can be written, such as s3://BUCKET/runs"
    if isinstance(error, FileNotFoundError):
        return "is there such a bucket, and are you allowed to see it? Make it, or mend the address"
    if isinstance(error, PermissionError) or "redential" in f"{type(error).__name__} {error}":
        keys = ", such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" if protocol in ("s3", "s3a") else ""
        return f"give every node the keys to the store{keys}, with the right to list, read, write and delete there"
    other = "; another S3 server is named by AWS_ENDPOINT_URL" if protocol in ("s3", "s3a") else ""
    return f"check the address and the network{other}"
