"""Download published files into a folder: checked by hash, resumable, and safe for several processes at once.

``harness.data.published`` lists the files of each data set.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import shutil
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from harness.errors import ConfigError, DataError
from harness.runs.files import commit, is_url

TIMEOUT_S = 30.0  # without any data from the server
_FAILURES = (OSError, http.client.HTTPException, ValueError)  # raised by urllib
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class PublishedFile:
    """The name, size, hash and URLs of a public file."""

    name: str
    num_bytes: int
    sha256: str
    urls: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}  {self.num_bytes} bytes  sha256 {self.sha256}"

    def mismatch(self, path: Path) -> str:
        """How ``path`` differs from this file; "" if it does not."""
        try:
            size = path.stat().st_size
            if size != self.num_bytes:
                return f"{size} bytes instead of {self.num_bytes}"
            with open(path, "rb") as stream:
                digest = hashlib.sha256()
                while block := stream.read(_BLOCK_BYTES):
                    digest.update(block)
        except OSError as error:
            return error.strerror or str(error)
        return "" if digest.hexdigest() == self.sha256 else "SHA-256 mismatch"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create ``folder`` and lock it for this process; other processes wait. Raises DataError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lock"):
            yield
    except (OSError, NotImplementedError) as error:  # the latter on a file system without locks
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"the data cannot be written: {reason}", where=str(folder), hint="name a folder that can be written"
        ) from None


def fetch(
    files: Sequence[PublishedFile],
    folder: Path,
    source: str | None,
    command: str,
    alternative: PublishedFile | None = None,
) -> list[str]:
    """Put all ``files`` into ``folder``, from their URLs or from ``source``, a path or a URL. Returns the new names.

    Intact files are kept, damaged ones replaced, and interrupted downloads resumed. The caller holds ``locked``. The
    hint of the DataError is to type ``command``, and mentions a file that may be used as an ``alternative``.
    """
    fetched = []
    for file in files:
        target = folder / file.name
        if not file.mismatch(target):
            continue
        failures = []
        for place in _places(file, source):
            if not (failure := _fetch(file, place, target)):
                break
            failures.append(f"{place}: {failure}")
        else:
            missing = "\n".join(f"       {file}" for file in files if file.mismatch(folder / file.name))
            missing += f"\n       or instead\n       {alternative}" if alternative else ""
            raise DataError(
                f"could not get {file.name}: " + "; ".join(failures),
                where=str(folder),
                hint=f"put these files into a folder and type {command} --from FOLDER\n{missing}",
            )
        fetched.append(file.name)
    return fetched


def local_path(source: str) -> Path:
    """The file or folder that ``source`` names. Raises ConfigError if it does not exist."""
    path = Path(source).expanduser()
    if not path.exists():
        raise ConfigError(
            f"{source} does not exist", where="--from", hint="name a folder with the files, or a URL (https://…)"
        )
    return path


def _places(file: PublishedFile, source: str | None) -> list[str]:
    """Possible paths or URLs of ``file``, the best first."""
    if source is None:
        return list(file.urls)
    if is_url(source):
        return [source if source.endswith(file.name) else f"{source.rstrip('/')}/{file.name}"]
    path = local_path(source)
    if path.is_file():
        return [str(path)]
    nested = [*path.glob(f"raw/{file.name}"), *path.glob(f"*/raw/{file.name}")]  # torchvision's folders
    return [str(path / file.name), *map(str, nested)]


def _fetch(file: PublishedFile, place: str, target: Path) -> str:
    """Copy or download ``place`` to ``target``. Returns why it failed, or ""."""
    part = target.with_name(target.name + ".part")
    try:
        if not is_url(place):
            shutil.copyfile(place, part)
        elif _download(file, place, part) and part.stat().st_size >= file.num_bytes and file.mismatch(part):
            part.unlink()  # the existing part was the beginning of another file
            _download(file, place, part)
    except _FAILURES as error:
        return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
    if mismatch := file.mismatch(part):
        if part.stat().st_size >= file.num_bytes or not is_url(place):
            part.unlink()  # otherwise the next attempt resumes the download
        return mismatch
    commit(part, target)
    return ""


def _download(file: PublishedFile, url: str, part: Path) -> bool:
    """Append the missing bytes of ``url`` to ``part``. Returns False if the server sent the file from its start."""
    have = part.stat().st_size if part.exists() else 0
    if have >= file.num_bytes:
        part.unlink()
        have = 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        resumed = bool(have) and getattr(answer, "status", None) == 206
        with open(part, "ab" if resumed else "wb") as stream:
            left = file.num_bytes + 1 - (have if resumed else 0)  # one more byte reveals a longer file
            while left > 0 and (block := answer.read(min(left, _BLOCK_BYTES))):
                stream.write(block)
                left -= len(block)
    return resumed
