"""Where converted tables are kept: one folder per source, one lock in it, and a manifest that marks what is complete.

    CACHE/tables/NAME-HASH/lock           held by the one process that converts
    CACHE/tables/NAME-HASH/KEY.arrow      text columns, Arrow IPC in record batches of equal length
    CACHE/tables/NAME-HASH/KEY.codes      labels as little-endian int32, in row order
    CACHE/tables/NAME-HASH/KEY.json       the manifest, written last; without it the others do not count
    CACHE/tables/NAME-HASH/VERSION.source the bytes of a remote file, as downloaded

What is inside those files is the business of convert.py and table.py. All of it may be deleted at any time: what is
open stays open, the rest is made again. Old versions of a source go when a new one is converted; a source that is never
opened again leaves its last version behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from harness.data.table.source import Source
from harness.errors import DataError
from harness.runs.files import default_cache_dir, write_atomically

FORMAT = 1  # raise it when the layout or the meaning of anything in the cache changes
try:
    import fcntl
except ImportError:  # Windows, where a mapped file cannot be deleted anyway
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = "lock"


@dataclass(frozen=True)
class Entry:
    """The files of one conversion: one source in one version with one label column."""

    folder: Path
    key: str

    @classmethod
    def of(cls, source: Source, label: str | None, cache_dir: Path | None) -> Entry:
        stem = re.sub(r"[^\w.-]", "_", Path(source.identity).name)[:40]
        place = hashlib.sha256(source.identity.encode()).hexdigest()[:16]
        key = hashlib.sha256(json.dumps([FORMAT, source.identity, source.version, label]).encode()).hexdigest()[:24]
        return cls((cache_dir or default_cache_dir()).expanduser().absolute() / "tables" / f"{stem}-{place}", key)

    @property
    def arrow(self) -> Path:
        return self.folder / f"{self.key}.arrow"

    @property
    def codes(self) -> Path:
        return self.folder / f"{self.key}.codes"

    @property
    def manifest(self) -> Path:
        return self.folder / f"{self.key}.json"

    @property
    def failure(self) -> Path:
        """What the last conversion ended with, if it was an error: for those who waited for it."""
        return self.folder / f"{self.key}.error.json"

    @property
    def kinds(self) -> Path:
        """The types of the columns, for DataFrames."""
        return self.folder / f"{self.key}.kinds.json"

    def download(self, source: Source) -> Path:
        """Where the bytes of a remote source are kept."""
        return self.folder / f"{hashlib.sha256(json.dumps(source.version).encode()).hexdigest()[:24]}.source"

    def load(self) -> dict[str, Any] | None:
        """The manifest if this entry is complete. Sizes are compared since mapping a cut file ends in SIGBUS."""
        try:
            manifest = json.loads(self.manifest.read_text(encoding="utf-8"))
            sizes = [os.stat(self.arrow).st_size, os.stat(self.codes).st_size if manifest["label"] is not None else 0]
        except (OSError, ValueError):
            return None
        return manifest if manifest["format"] == FORMAT and sizes == manifest["bytes"] else None

    def publish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest: from here on the entry is complete."""
        write_atomically(self.manifest, json.dumps(manifest, ensure_ascii=False))

    def sweep(self, source: Source) -> None:
        """Delete what crashed conversions and older versions of the source left. Call it with the lock held.

        An older version that a process of this node still has open stays: its loader workers may yet map it.
        """
        keep = {LOCK_NAME, self.download(source).name}
        for path in self.folder.glob("*.json"):
            other = Entry(self.folder, path.name.split(".")[0])
            if path != other.manifest or other.key == self.key:
                continue
            if _version_in(path) == list(source.version) or _is_held(other.arrow):
                keep |= {p.name for p in (other.manifest, other.arrow, other.codes, other.kinds)}
        for path in self.folder.iterdir():
            if path.name not in keep:
                with contextlib.suppress(OSError):
                    path.unlink()

    def hold(self, owner: object) -> None:
        """Keep the entry from being swept as long as ``owner`` lives, in this process or a fork of it.

        Raises FileNotFoundError.
        """
        descriptor = os.open(self.arrow, os.O_RDONLY)
        weakref.finalize(owner, os.close, descriptor)
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a failure to write into this folder into a DataError that says what to set."""
        try:
            yield
        except NotImplementedError as error:  # filelock, where the file system cannot lock
            raise DataError(f"the table cache cannot be locked: {error}", where=str(self.folder), hint=_HINT) from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise DataError(
                f"the table cache cannot be written: {reason}", where=str(self.folder), hint=_HINT
            ) from error

    def try_lock(self) -> filelock.BaseFileLock | None:
        """The lock of this source if nobody holds it. The system frees it when its holder dies, however it dies."""
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.folder / LOCK_NAME)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                return None
            return lock


_HINT = "set APEX_HARNESS_CACHE (or cache_dir) to a folder on a local disk with room for about the size of the CSV"


def _version_in(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("version")
    except (OSError, ValueError, AttributeError):
        return None


def _is_held(path: Path) -> bool:
    """Whether a process has called ``hold`` and lives."""
    if fcntl is None:
        return False
    try:
        with open(path, "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
