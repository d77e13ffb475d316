"""The cache of converted tables: one folder per source, with a lock and a manifest per complete conversion.

    CACHE/tables/NAME-HASH/lock           locked by the process that converts, as far as the file system allows
    CACHE/tables/NAME-HASH/converting     the lease of that process, for machines that do not see the lock
    CACHE/tables/NAME-HASH/KEY.arrow      text columns, Arrow IPC in record batches of equal length
    CACHE/tables/NAME-HASH/KEY.codes      labels in row order: codes as little-endian int32, or numbers as float64
    CACHE/tables/NAME-HASH/KEY.offsets    if rows have several labels: the first code of each row, and the end, as int64
    CACHE/tables/NAME-HASH/KEY.json       the manifest, written last; without it the other files are ignored
    CACHE/tables/NAME-HASH/VERSION.source a downloaded remote file

The cache may be deleted at any time: open tables stay open, anything else is converted again. Converting a new version
of a source deletes the old ones. The last version of a source that is never opened again stays.

Machines may share the cache. Temporary names differ, so that two processes that convert at the same time, because one
took the lease of the other, do no harm: both write the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from harness.data.table.labels import LabelColumns
from harness.data.table.source import Source
from harness.errors import DataError, reason, remedy
from harness.runs.files import default_cache_dir, parse_json, write_atomically
from harness.runs.lease import Lease
from harness.runs.storage import LocalStore

FORMAT = 3  # increase it when the layout or the meaning of anything in the cache changes
LOCK_NAME, LEASE_NAME = "lock", "converting"
_UNUSED_S = 86400.0  # after which a version that another machine converted is deleted, if another one has replaced it
try:
    import fcntl
except ImportError:  # Windows, where a mapped file cannot be deleted anyway
    fcntl = None  # type: ignore[assignment]

_HINT = (
    "set APEX_HARNESS_CACHE (or data.cache_dir) to a folder on a local disk that has about as much free space as the "
    "CSV takes"
)


@dataclass(frozen=True)
class CacheEntry:
    """The files of one conversion: one source, in one version, with one choice of label columns."""

    folder: Path
    key: str

    @classmethod
    def of(cls, source: Source, label: LabelColumns | None, cache_dir: Path | None) -> CacheEntry:
        stem = re.sub(r"[^\w.-]", "_", Path(source.identity).name)[:40]
        place = hashlib.sha256(source.identity.encode()).hexdigest()[:16]
        content = json.dumps([FORMAT, source.identity, source.version, label.key if label else None])
        key = hashlib.sha256(content.encode()).hexdigest()[:24]
        return cls((cache_dir or default_cache_dir()).expanduser().absolute() / "tables" / f"{stem}-{place}", key)

    @property
    def arrow(self) -> Path:
        return self.folder / f"{self.key}.arrow"

    @property
    def codes(self) -> Path:
        return self.folder / f"{self.key}.codes"

    @property
    def offsets(self) -> Path:
        return self.folder / f"{self.key}.offsets"

    @property
    def files(self) -> tuple[Path, Path, Path]:
        return self.arrow, self.codes, self.offsets

    def sizes(self) -> list[int]:
        """The bytes of the files that exist. Raises OSError if there are no text columns."""
        others = (path.stat().st_size if path.exists() else 0 for path in (self.codes, self.offsets))
        return [self.arrow.stat().st_size, *others]

    @property
    def manifest(self) -> Path:
        return self.folder / f"{self.key}.json"

    @property
    def failure(self) -> Path:
        """The DataError of the last conversion, for processes that waited for it."""
        return self.folder / f"{self.key}.error.json"

    def download(self, source: Source) -> Path:
        """The local copy of a remote source."""
        return self.folder / f"{hashlib.sha256(json.dumps(source.version).encode()).hexdigest()[:24]}.source"

    def load(self) -> dict[str, Any] | None:
        """Return the manifest if the entry is complete. Sizes are checked because mapping a truncated file ends in
        SIGBUS.
        """
        manifest = read_json(self.manifest)
        if manifest is None or manifest.get("format") != FORMAT:
            return None
        try:
            return manifest if self.sizes() == manifest["bytes"] else None
        except OSError:
            return None

    def publish(self, manifest: dict[str, Any], mark: str) -> None:
        """Write the manifest, which makes the entry complete. ``mark``: of the temporary names of this conversion."""
        content = manifest | {"format": FORMAT, "host": socket.gethostname()}
        write_atomically(self.manifest, json.dumps(content, ensure_ascii=False), mark)

    def sweep(self, source: Source) -> None:
        """Delete the files of crashed conversions and of older versions of the source. The caller holds the lock.

        An older version that a process has open stays, because its loader workers may still map it. So does a recent
        one of another machine, where locks may not show that, and whose own copy of the source it may be.
        """
        keep = {LOCK_NAME, LEASE_NAME, self.download(source).name}
        for path in self.folder.glob("*.json"):
            other = CacheEntry(self.folder, path.name.split(".")[0])
            if path != other.manifest or other.key == self.key:
                continue
            facts = read_json(path) or {}
            is_current = facts.get("version") == list(source.version) or _is_of_other(facts, path)
            if is_current or _is_held(other.arrow):
                keep |= {p.name for p in (other.manifest, other.arrow, other.codes, other.offsets)}
        for path in self.folder.iterdir():
            if path.name not in keep:
                with contextlib.suppress(OSError):
                    path.unlink()

    def hold(self, owner: object) -> None:
        """Keep the entry from being swept while ``owner`` is alive, in this process or a fork of it.

        Raises FileNotFoundError.
        """
        descriptor = os.open(self.arrow, os.O_RDONLY)
        weakref.finalize(owner, os.close, descriptor)
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a failure to write into the cache into a DataError with a remedy."""
        try:
            yield
        except NotImplementedError as error:  # raised by filelock on a file system without locks
            raise DataError(f"the table cache cannot be locked: {error}", where=str(self.folder), hint=_HINT) from error
        except OSError as error:
            raise DataError(
                f"the table cache cannot be written: {reason(error)}",
                where=str(self.folder),
                hint=remedy(error, f"or {_HINT}"),
            ) from error

    def lease(self) -> Lease:
        """The right to convert this source, for ``try_lock``."""
        return Lease(LocalStore(self.folder), LEASE_NAME)

    def try_lock(self, lease: Lease) -> contextlib.ExitStack | None:
        """Let this process alone convert this source until the result is closed; None if another one converts."""
        with self.writing(), contextlib.ExitStack() as stack:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.folder / LOCK_NAME)
            with contextlib.suppress(filelock.Timeout):
                lock.acquire(timeout=0)
                stack.callback(lock.release)
            if not lease.acquire(alone=lock.is_locked):
                return None
            stack.callback(lease.release)
            return stack.pop_all()


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file or it holds something else."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _is_of_other(facts: dict[str, Any], manifest: Path) -> bool:
    """True for a version that another machine converted a short time ago."""
    with contextlib.suppress(OSError):
        age_s = time.time() - manifest.stat().st_mtime
        return facts.get("host") != socket.gethostname() and age_s < _UNUSED_S
    return False


def _is_held(path: Path) -> bool:
    """True while a process that called ``hold`` is alive."""
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
