"""The cache of converted tables: one folder per source, with a lock and a manifest per complete conversion.

    CACHE/tables/NAME-HASH/lock           locked by the process that converts
    CACHE/tables/NAME-HASH/KEY.arrow      text columns, Arrow IPC in record batches of equal length
    CACHE/tables/NAME-HASH/KEY.codes      labels in row order: codes as little-endian int32, or numbers as float64
    CACHE/tables/NAME-HASH/KEY.offsets    if rows have several labels: the first code of each row, and the end, as int64
    CACHE/tables/NAME-HASH/KEY.json       the manifest, written last; without it the other files are ignored. A line
                                          of JSON with the digests of their blocks, and its own digest
    CACHE/tables/NAME-HASH/VERSION.source a downloaded remote file

The cache may be deleted at any time: open tables stay open, anything else is converted again. Converting a new version
of a source deletes the old ones that were not opened for a day. The last version of a source stays.

Machines may share the cache. Temporary names differ, so that two processes that convert at the same time do no harm:
both write the same, and the last one wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.data.table.labels import LabelColumns
from harness.data.table.source import Source
from harness.errors import DataError, reason, remedy
from harness.runs.files import cache_folder, parse_json, write_atomically
from harness.runs.locks import MARKER_SUFFIX, Lock

FORMAT = 4  # increase it when the layout or the meaning of anything in the cache changes
UNUSED_S = 86400.0  # after which a version is deleted, if another one has replaced it
SILENT_S = 30.0  # after which a process that writes nothing is not waited for: it may be stopped, or its machine lost
_POLL_S = 0.05
_LOCK_NAME = "lock"

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
        return cls(cache_folder(cache_dir) / "tables" / f"{stem}-{place}", key)

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

    def load(self, damaged: str = "") -> dict[str, Any] | None:
        """Return the manifest if the entry is complete, and is not the conversion with the id ``damaged``.

        Sizes are checked because mapping a truncated file ends in SIGBUS; the rest of the content is checked when it is
        used.
        """
        manifest = read_checked(self.manifest)
        if manifest is None or manifest["format"] != FORMAT or manifest["id"] == damaged:
            return None
        try:
            return manifest if self.sizes() == manifest["bytes"] else None
        except OSError:
            return None

    def publish(self, manifest: dict[str, Any], mark: str) -> None:
        """Write the manifest, which makes the entry complete. ``mark``: of the temporary names of this conversion."""
        write_checked(self.manifest, manifest | {"format": FORMAT}, mark)

    def discard(self, source: Source) -> None:
        """Remove a damaged conversion. The files that processes have mapped stay until they unmap them."""
        for path in (self.manifest, *self.files, self.download(source)):
            with contextlib.suppress(OSError):
                path.unlink()

    def sweep(self, source: Source) -> None:
        """Delete the files of crashed conversions and of older versions of the source. The caller holds the lock.

        An older version that was opened in the last day stays: loader processes of a run may open it again.
        """
        keep = {_LOCK_NAME, _LOCK_NAME + MARKER_SUFFIX, self.download(source).name}
        for path in self.folder.glob("*.json"):
            other = CacheEntry(self.folder, path.name.split(".")[0])
            if path != other.manifest or other.key == self.key:
                continue
            is_current = (read_checked(path) or {}).get("version") == list(source.version)
            if is_current or _age_s(path) < UNUSED_S:
                keep |= {p.name for p in (other.manifest, *other.files)}
        for path in self.folder.iterdir():
            if path.name not in keep:
                with contextlib.suppress(OSError):
                    path.unlink()

    def touch(self) -> None:
        """Note that the entry is in use."""
        with contextlib.suppress(OSError):  # a cache that may only be read
            os.utime(self.manifest)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a failure to write into the cache into a DataError with a remedy."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"the table cache cannot be written: {reason(error)}",
                where=str(self.folder),
                hint=remedy(error, f"or {_HINT}"),
            ) from error

    @contextlib.contextmanager
    def alone(self, damaged: str = "") -> Iterator[bool]:
        """Context in which other processes do not convert this source; waits for one that does.

        False if this could not be ensured: the file system has no locks, or the other process has written nothing for
        ``SILENT_S``. Ends the wait also when the entry is complete (and not ``damaged``).
        """
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(self.folder / _LOCK_NAME)
        try:
            with self.writing():
                is_alone = self._wait_for(lock, damaged)
            yield is_alone
        finally:
            lock.release()

    def _wait_for(self, lock: Lock, damaged: str) -> bool:
        seen, since = self._marks(), time.monotonic()
        while time.monotonic() - since < SILENT_S and self.load(damaged) is None:
            if lock.try_acquire():
                return True
            time.sleep(_POLL_S)
            if (marks := self._marks()) != seen:
                seen, since = marks, time.monotonic()
        return False

    def _marks(self) -> set[tuple[str, int, int]]:
        """What changes in the folder while a process converts."""
        found = set()
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.add((path.name, stat.st_size, stat.st_mtime_ns))
        return found


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file or it holds something else."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_checked(path: Path, content: dict[str, Any], mark: str) -> None:
    """Write ``content`` as a line of JSON and a line with its digest. ``mark``: of the temporary name."""
    text = json.dumps(content, ensure_ascii=False)
    write_atomically(path, f"{text}\n{_digest(text)}\n", mark)


def read_checked(path: Path) -> dict[str, Any] | None:
    """What ``write_checked`` has written; None if the file is damaged or missing."""
    try:
        text, digest, _ = path.read_text(encoding="utf-8").split("\n")
        return parse_json(text) if digest == _digest(text) else None
    except (OSError, ValueError):
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _age_s(path: Path) -> float:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0
