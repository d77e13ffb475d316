"""The annotation file that a table is made of, local or behind fsspec: its version, its format, its bytes.

A version is (size, times of modification and of any change in ns, inode) of a local file, since archives set the first
two, and (size, ETag or the nearest equivalent) of a remote one.
An edit that changes none of these cannot be detected.
"""

from __future__ import annotations

import gzip
import importlib
import os
import shlex
import time
import zlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

from harness.config.places import is_url
from harness.errors import DataError, did_you_mean, first_few, remedy, require_regular_file
from harness.runs.fetch import attempted

if TYPE_CHECKING:
    import pyarrow as pa

# First bytes of files that are no tables, and how to convert them.
_FOREIGN = {
    b"PK\x03\x04": ("a zip archive", "unpack it: unzip {name}"),
    b"BZh": ("bzip2", "unpack it: bunzip2 {name}"),
    b"\xfd7zXZ\x00": ("xz", "unpack it: unxz {name}"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unpack it: unzstd {name}"),
    b"\xff\xfe": ("UTF-16 text", "save it as UTF-8: iconv -f UTF-16 -t UTF-8 {name}"),
    b"\xfe\xff": ("UTF-16 text", "save it as UTF-8: iconv -f UTF-16 -t UTF-8 {name}"),
    b'{"': (
        "JSON Lines",
        'convert it: python -c "import sys, pandas; pandas.read_json(sys.argv[1], lines=True).to_csv(sys.argv[2], '
        'index=False)" {name} NAME.csv',
    ),
}
BROKEN = (OSError, EOFError, zlib.error)  # a damaged gzip file raises any of them
_GZIP = b"\x1f\x8b"
_KINDS = {b"PAR1": "parquet", _GZIP: "csv.gz"}  # by the first bytes

# What servers call a value that changes with the content, the most reliable first. The size is always used as well.
_MARKS = (
    "ETag", "etag", "md5Hash", "crc32c", "generation", "checksum", "sha256", "Content-MD5", "Digest", "mtime",
    "LastModified", "Last-Modified", "last_modified", "updated", "modified", "last_commit", "created",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """An annotation file at one moment. ``name`` is for error messages, ``identity`` is the real path or the URL."""

    name: str
    identity: str
    version: tuple[int | str, ...]

    @property
    def is_remote(self) -> bool:
        return is_url(self.identity)

    def settle(self) -> None:
        """Wait, for at most two seconds, until a later change of the file would change its version: some file systems
        record times in whole seconds, FAT in every second one."""
        if self.is_remote:
            return
        newest = max(stamp for stamp in self.version[1:3] if isinstance(stamp, int))
        unit = 2_000_000_000 if newest % 1_000_000_000 == 0 else 10_000_000  # ns; the other clocks tick faster
        if 0 <= (age := time.time_ns() - newest) < unit:
            time.sleep((unit - age) / 1e9)

    def is_current(self) -> bool:
        """Return False if the file changed since this object was made. Asks the server about a remote file."""
        try:
            return locate(self.identity).version == self.version
        except DataError:
            return False


def locate(source: str | os.PathLike[str]) -> Source:
    """Find the file and read its version, not its content. Raises DataError if there is no such file."""
    name = os.fspath(source).removeprefix("file://")
    if is_url(name):
        return Source(name, name, _remote_version(name))
    if os.path.isdir(name):
        raise DataError("this is a folder, not an annotation file", where=name, hint=_files_in(Path(name)))
    try:
        require_regular_file(name)
        stat = os.stat(name)
    except FileNotFoundError as error:
        if os.path.islink(name):
            raise DataError(f"no such annotation file: {error.strerror}", where=name) from None
        raise DataError("no such annotation file", where=name, hint=_nearest_file(Path(name))) from None
    except OSError as error:
        message = f"the annotation file cannot be read: {error.strerror}"
        raise DataError(message, where=name, hint=remedy(error)) from error
    if stat.st_size == 0:
        raise _empty(name)
    path = os.path.realpath(name)
    if any("\ud800" <= letter <= "\udfff" for letter in path):
        raise DataError(f"the path is not UTF-8 text: {path!r}", where=name, hint="rename the folder")
    # Archives unpack each file with a recorded mtime, which may be the same for two versions of it.
    return Source(name, path, (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))


def require_root(root: str) -> None:
    """Raise DataError if ``root``, to which paths in the rows are relative, is a folder that does not exist. A URL is
    not asked."""
    folder = root.removeprefix("file://")
    if folder and not is_url(folder) and not os.path.isdir(folder):
        problem = f"{folder} is not a folder" if os.path.exists(folder) else f"the folder {folder} does not exist"
        meaning = "image paths are relative to task.root, which is itself relative to the working folder"
        hint = f"{did_you_mean(folder, os.path.isdir)} {meaning}".strip()
        raise DataError(problem, where="task.root", hint=hint)


def kind_of(path: Path, name: str) -> str:
    """Return ``csv``, ``csv.gz`` or ``parquet``, by the first bytes of the file, not its name. Raises DataError."""
    try:
        with open(path, "rb") as stream:
            head = stream.read(8)
    except OSError as error:
        message = f"the annotation file cannot be read: {error.strerror}"
        raise DataError(message, where=name, hint=remedy(error)) from error
    for magic, kind in _KINDS.items():
        if head.startswith(magic):
            return kind
    for magic, (format_name, advice) in _FOREIGN.items():
        if head.startswith(magic):
            hint = advice.format(name=shlex.quote(name))
            raise DataError(f"the file is {format_name}, not CSV, gzipped CSV or Parquet", where=name, hint=hint)
    return "csv"


class Reader(Protocol):
    """The module of a format, NAME_reader.py. ``name``: of the file, for messages. All raise DataError."""

    def read_header(self, path: Path, name: str, needed: Iterable[str] = ()) -> list[str]:
        """Return the columns, in order; all of ``needed`` that are there can be text."""
        ...

    def read_batches(self, path: Path, name: str, columns: list[str]) -> Generator[pa.RecordBatch, None, None]:
        """Yield the rows of these ``columns`` as text, in order, in nonempty batches of any length."""
        ...

    def lines_of(self, path: Path, rows: Sequence[int]) -> list[int]:
        """Return the line on which each of ``rows`` starts, which ascend; empty if the format has no lines."""
        ...


def reader_of(kind: str) -> Reader:
    """Return the module that reads files of ``kind``, imported."""
    name = kind.removesuffix(".gz")
    return cast(Reader, importlib.import_module(f"harness.data.table.{name}_reader"))


def open_bytes(path: Path) -> BinaryIO:
    """Open a CSV, unpacking it if it is gzipped; every ``read(n)`` returns n bytes until the end.

    Reading raises one of BROKEN if the gzip file is damaged.
    """
    with open(path, "rb") as stream:
        zipped = stream.read(2) == _GZIP
    return cast(BinaryIO, gzip.open(path, "rb")) if zipped else open(path, "rb")


def _nearest_file(path: Path) -> str:
    if hint := did_you_mean(path):
        return hint
    if not path.parent.is_dir():
        demo = f"; harness data digits {path.parent} writes the digits" if path.parent.name == "digits" else ""
        return f"the folder {path.parent} does not exist either; relative paths are resolved against {Path.cwd()}{demo}"
    return _files_in(path.parent)


def _files_in(folder: Path) -> str:
    try:
        names = sorted(p.name for p in folder.iterdir() if p.name.endswith((".csv", ".csv.gz", ".parquet")))
    except OSError:
        return ""
    if not names:
        return f"{folder} has no file that ends with .csv, .csv.gz or .parquet"
    return f"annotation files in {folder}: {first_few(names, 5)}"


def _remote_version(url: str) -> tuple[int | str, ...]:
    """Return (size, ETag or the nearest equivalent), from the server each time. Raises DataError."""

    def ask() -> tuple[dict[str, Any], str]:
        import fsspec  # late: few need it, and its import takes long

        filesystem, path = fsspec.core.url_to_fs(url)
        filesystem.invalidate_cache()  # or info() may answer from an older listing
        return filesystem.info(path), str(filesystem.ukey(path))

    try:
        info, other_mark = attempted(url, ask)
    except FileNotFoundError:
        raise DataError("no such annotation file", where=url, hint="check the URL") from None
    size = info.get("size")
    if info.get("type") == "directory":
        hint = "give the URL of a .csv, .csv.gz or .parquet file"
        raise DataError("this is a folder, not an annotation file", where=url, hint=hint)
    if size == 0:
        raise _empty(url)
    return int(size or -1), next((str(info[mark]) for mark in _MARKS if info.get(mark)), other_mark)


def _empty(name: str) -> DataError:
    return DataError("the annotation file is empty (0 bytes)", where=name, hint="check that it was written completely")
