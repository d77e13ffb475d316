"""Where an annotation file lies: on this machine or behind fsspec; its version; how its bytes begin.

Nothing here knows what is inside the file. A version is (size, modification time in ns) of a local file, or the
ETag (or what comes nearest) of a remote one. An edit that keeps both size and modification time cannot be seen.
"""

from __future__ import annotations

import difflib
import gzip
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from harness.errors import DataError
from harness.runs.files import is_url

# What a file that is surely not text begins with, and what to type about it.
_FOREIGN = {
    b"PK\x03\x04": ("a zip archive", "unpack it: unzip {name}"),
    b"BZh": ("bzip2", "unpack it: bunzip2 {name}"),
    b"\xfd7zXZ\x00": ("xz", "unpack it: unxz {name}"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unpack it: unzstd {name}"),
    b"\xff\xfe": ("UTF-16 text", "save it as UTF-8: iconv -f UTF-16 -t UTF-8 {name}"),
    b"\xfe\xff": ("UTF-16 text", "save it as UTF-8: iconv -f UTF-16 -t UTF-8 {name}"),
}
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"


@dataclass(frozen=True)
class Source:
    """An annotation file at one moment. ``name`` is for messages, ``identity`` the real path or URL."""

    name: str
    identity: str
    version: tuple[int | str, ...]

    @property
    def is_remote(self) -> bool:
        return is_url(self.identity)

    def is_current(self) -> bool:
        """Whether the file still is what it was when this object was made (remote: asks the server)."""
        try:
            return locate(self.identity).version == self.version
        except DataError:
            return False


def locate(source: str | os.PathLike[str]) -> Source:
    """Find the file and read its version, not its content; DataError if there is no such file."""
    name = os.fspath(source)
    if name.startswith("file://"):
        name = name[len("file://") :]
    if is_url(name):
        from harness.data.table.remote import version  # fsspec is needed by few, and slow to import

        return Source(name, name, version(name))
    try:
        stat = os.stat(name)
    except FileNotFoundError:
        raise DataError("no such annotation file", where=name, hint=_nearest_file(Path(name))) from None
    except OSError as error:
        raise DataError(f"the annotation file cannot be reached: {error.strerror}", where=name) from error
    if os.path.isdir(name):
        raise DataError("this is a folder, not an annotation file", where=name, hint=_files_in(Path(name)))
    if stat.st_size == 0:
        raise DataError("the annotation file is empty (0 bytes)", where=name, hint="was it written completely?")
    return Source(name, os.path.realpath(name), (stat.st_size, stat.st_mtime_ns))


def kind_of(path: Path, name: str) -> str:
    """``csv``, ``csv.gz`` or ``parquet``, by the first bytes and never by the name; DataError for anything else."""
    try:
        with open(path, "rb") as stream:
            head = stream.read(8)
    except OSError as error:
        raise DataError(f"the annotation file cannot be read: {error.strerror}", where=name) from error
    if head.startswith(_PARQUET):
        return "parquet"
    if head.startswith(_GZIP):
        return "csv.gz"
    for magic, (what, remedy) in _FOREIGN.items():
        if head.startswith(magic):
            hint = remedy.format(name=name)
            raise DataError(f"the file is {what}; CSV, gzipped CSV or Parquet is needed", where=name, hint=hint)
    return "csv"


def open_bytes(path: Path) -> BinaryIO:
    """The bytes of a CSV, unpacked if they are gzipped; every ``read(n)`` gives n bytes until the end."""
    with open(path, "rb") as stream:
        zipped = stream.read(2) == _GZIP
    return cast(BinaryIO, gzip.open(path, "rb")) if zipped else open(path, "rb")


def nearest(word: str, words: Iterable[str]) -> str:
    """``did you mean 'label'?``, or nothing."""
    by_lower = {w.lower().strip(): w for w in words}
    found = difflib.get_close_matches(word.lower().strip(), by_lower, n=1, cutoff=0.6)
    return f"did you mean {by_lower[found[0]]!r}?" if found else ""


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent} either; relative paths start at {Path.cwd()}"
    try:
        names = [p.name for p in path.parent.iterdir()]
    except OSError:
        return ""
    return nearest(path.name, names) or _files_in(path.parent)


def _files_in(folder: Path) -> str:
    try:
        names = sorted(p.name for p in folder.iterdir() if p.is_file())
    except OSError:
        return ""
    if not names:
        return f"there are no files in {folder}"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"files in {folder}: {', '.join(names[:5])}{more}"
