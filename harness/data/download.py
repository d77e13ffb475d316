"""Download published files into a folder: verified by hash, completely or not at all, by one process at a time.

``harness.tools.data.published`` lists the files of each dataset.
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

from harness.errors import ConfigError, DataError, did_you_mean, reason, remedy
from harness.runs.files import expanded, is_url, replacing
from harness.runs.locks import locked as lock

TIMEOUT_S = 30.0  # without any data from the server
_FAILURES = (OSError, http.client.HTTPException, ValueError)  # raised by urllib
_LOCK_S = 3600.0  # for another process that downloads into the same folder
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
        """The difference between ``path`` and this file; "" if there is none."""
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
        with lock(folder / ".lock", _LOCK_S):
            yield
    except OSError as error:
        raise DataError(
            f"the data cannot be written: {reason(error)}",
            where=str(folder),
            hint=remedy(error, "or choose another folder"),
        ) from None


def fetch(
    files: Sequence[PublishedFile],
    folder: Path,
    source: str | None,
    command: str,
    alternative: PublishedFile | None = None,
) -> list[str]:
    """Put all ``files`` into ``folder``, from their URLs or from ``source``, a path or a URL. Returns the new names.

    Intact files are kept and damaged ones replaced. The caller holds ``locked``. The hint of the DataError is to type
    ``command``, and mentions a file that may be used as an ``alternative``.
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
            missing += f"\n       or, instead of these,\n       {alternative}" if alternative else ""
            raise DataError(
                f"could not get {file.name}: " + "; ".join(failures),
                where=str(folder),
                hint=f"put these files into a folder and run {command} --from FOLDER\n{missing}",
            )
        fetched.append(file.name)
    return fetched


def local_path(source: str) -> Path:
    """The file or folder that ``source`` names. Raises ConfigError if it does not exist."""
    path = expanded(source)
    if not path.exists():
        hint = did_you_mean(path) or "give a folder with the files, or a URL (https://…)"
        raise ConfigError(f"{source} does not exist", where="--from", hint=hint)
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
    try:
        with replacing(target) as temporary:
            if is_url(place):
                _download(place, temporary, file.num_bytes)
            else:
                shutil.copyfile(place, temporary)
            if mismatch := file.mismatch(temporary):
                raise ValueError(mismatch)
    except _FAILURES as error:
        return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
    return ""


def _download(url: str, path: Path, num_bytes: int) -> None:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer, open(path, "wb") as stream:
        left = num_bytes + 1  # one more byte reveals a longer file
        while left > 0 and (block := answer.read(min(left, _BLOCK_BYTES))):
            stream.write(block)
            left -= len(block)
