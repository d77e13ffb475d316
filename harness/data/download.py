"""Published files, brought into a folder once: checked by hash, by one process at a time, never half there.

What a data set consists of is said in ``harness.data.published``.
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
from harness.runs.files import commit, is_url, write_atomically

TIMEOUT_S = 30.0  # of a connection that says nothing
_FAILURES = (OSError, http.client.HTTPException, ValueError)  # what urllib raises
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Published:
    """A file that anybody can get: its name, size and hash, and where."""

    name: str
    num_bytes: int
    sha256: str
    urls: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}  {self.num_bytes} bytes  sha256 {self.sha256}"

    def damage(self, path: Path) -> str:
        """What is wrong with ``path``; empty where it is this file, whole."""
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
        return "" if digest.hexdigest() == self.sha256 else "its hash is another one"


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """``folder``, made where it is missing, to one process at a time; the others wait. Raises DataError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lock"):
            yield
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"the data cannot be written: {reason}", where=str(folder), hint="name a folder that can be written"
        ) from None


def bring(
    files: Sequence[Published], folder: Path, source: str | None, command: str, instead: Published | None = None
) -> list[str]:
    """Every one of ``files`` into ``folder``, from where each is published, or from ``source``: a path or a URL.

    Files that are there and whole are kept, broken ones replaced, interrupted downloads continued. Returns what was
    brought. The hint of the DataError says what to type, ``command``, and which file would do ``instead``. Call it
    ``alone``.
    """
    brought = []
    for file in files:
        target = folder / file.name
        if not file.damage(target):
            continue
        failures = []
        for place in _places(file, source):
            if not (failure := _fetched(file, place, target)):
                break
            failures.append(f"{place}: {failure}")
        else:
            missing = "\n".join(f"       {file}" for file in files if file.damage(folder / file.name))
            missing += f"\n       or in its place\n       {instead}" if instead else ""
            raise DataError(
                f"{file.name} cannot be had: " + "; ".join(failures),
                where=str(folder),
                hint=f"put these files into a folder and type {command} --from FOLDER\n{missing}",
            )
        brought.append(file.name)
    return brought


def replace(path: Path, content: bytes) -> bool:
    """``path`` holds ``content``, whole at any moment; whether it had to be written."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == len(content) and path.read_bytes() == content:
            return False
    write_atomically(path, content)
    return True


def local(source: str) -> Path:
    """The file or folder ``source`` names. Raises ConfigError where there is none."""
    path = Path(source).expanduser()
    if not path.exists():
        raise ConfigError(
            f"there is no {source}", where="--from", hint="name a folder with the files in it, or a URL (https://…)"
        )
    return path


def _places(file: Published, source: str | None) -> list[str]:
    """Where ``file`` may be, the best first."""
    if source is None:
        return list(file.urls)
    if is_url(source):
        return [source if source.endswith(file.name) else f"{source.rstrip('/')}/{file.name}"]
    path = local(source)
    if path.is_file():
        return [str(path)]
    nested = [*path.glob(f"raw/{file.name}"), *path.glob(f"*/raw/{file.name}")]  # as torchvision keeps them
    return [str(path / file.name), *map(str, nested)]


def _fetched(file: Published, place: str, target: Path) -> str:
    """Bring ``place`` to ``target``; why it failed, or nothing."""
    part = target.with_name(target.name + ".part")
    try:
        if not is_url(place):
            shutil.copyfile(place, part)
        elif _downloaded(file, place, part) and part.stat().st_size >= file.num_bytes and file.damage(part):
            part.unlink()  # what was there before was the beginning of something else
            _downloaded(file, place, part)
    except _FAILURES as error:
        return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
    if damage := file.damage(part):
        if part.stat().st_size >= file.num_bytes or not is_url(place):
            part.unlink()  # else the next try goes on from here
        return damage
    commit(part, target)
    return ""


def _downloaded(file: Published, url: str, part: Path) -> bool:
    """Append what ``part`` lacks of ``url``, where the server can do that; whether it could."""
    have = part.stat().st_size if part.exists() else 0
    if have >= file.num_bytes:
        part.unlink()
        have = 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        goes_on = bool(have) and getattr(answer, "status", None) == 206
        with open(part, "ab" if goes_on else "wb") as stream:
            left = file.num_bytes + 1 - (have if goes_on else 0)  # one more tells that it is another file
            while left > 0 and (block := answer.read(min(left, _BLOCK_BYTES))):
                stream.write(block)
                left -= len(block)
    return goes_on
