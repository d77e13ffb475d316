"""Converted tables in a folder or at a URL that machines share: one converts a file, the others copy the result.

    PLACE/tables/KEY/table.json           the manifest, written last; it names the other files
    PLACE/tables/KEY/MARK.arrow, ...      the files of the table (cache.py); each conversion has a mark of its own
    PLACE/tables/KEY/converting           the lease of the process that converts

The key depends on the content of a local file, so it does not matter where machines have it; of a file at a URL it
depends on the URL and the ETag. Nothing is deleted there.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from harness.data.table.cache import FORMAT, LEASE_NAME, CacheEntry
from harness.data.table.labels import LabelColumns
from harness.data.table.source import Source
from harness.errors import DataError, reason, remedy
from harness.runs.files import commit, is_url, parse_json, sha256
from harness.runs.lease import Lease
from harness.runs.storage import LocalStore, SharedStore
from harness.runs.url_store import UrlStore

_POLL_S = 1.0
_MANIFEST = "table.json"


def obtain(
    place: str, source: Source, entry: CacheEntry, label: LabelColumns | None, convert: Callable[[], None]
) -> None:
    """Fill ``entry`` with the table at ``place``; if there is none, by ``convert()``, and copy the result to ``place``.

    The caller holds the lock of the entry. While another machine converts, this one waits. Raises DataError, or
    ConfigError if ``place`` cannot be used.
    """
    content = sha256(Path(source.identity)) if not source.is_remote else [source.identity, source.version]
    key = hashlib.sha256(json.dumps([FORMAT, content, label.key if label else None]).encode()).hexdigest()[:32]
    folder = f"{place.rstrip('/')}/tables/{key}"
    store = UrlStore(folder) if is_url(place) else LocalStore(Path(folder).absolute())
    try:
        lease = Lease(store, LEASE_NAME)
        while not _download(store, source, entry):
            if not lease.acquire():
                time.sleep(_POLL_S)
                continue
            try:
                if not _download(store, source, entry):
                    convert()
                    _upload(store, entry)
            finally:
                lease.release()
            return
    except OSError as error:
        what = f"the shared tables cannot be read or written: {reason(error)}"
        raise DataError(what, where=store.where, hint=remedy(error, "or choose another task.shared_tables")) from error


def _download(store: SharedStore, source: Source, entry: CacheEntry) -> bool:
    """Copy the table from ``store`` into ``entry``; False if there is none, or it is incomplete."""
    try:
        manifest = parse_json(store.read(_MANIFEST))
        names, sizes = manifest["files"], manifest["bytes"]
    except (ValueError, TypeError, KeyError):
        return False
    mark = secrets.token_hex(8)
    with entry.writing():
        for path in entry.files:
            if path.suffix in names:
                copy = path.with_name(f"{mark}{path.suffix}")
                try:
                    store.get(names[path.suffix], copy)
                except FileNotFoundError:
                    return False
                commit(copy, path)
        if entry.sizes() != sizes:
            return False
        entry.publish(manifest | {"source": source.identity, "version": source.version}, mark)
    return True


def _upload(store: SharedStore, entry: CacheEntry) -> None:
    """Copy the complete table ``entry`` to ``store``."""
    manifest, mark = entry.load(), secrets.token_hex(8)
    if manifest is None:
        raise DataError(
            "the converted table is no longer in the cache", where=str(entry.folder), hint="run the same command again"
        )
    names = {path.suffix: f"{mark}{path.suffix}" for path in entry.files if path.exists()}
    for path in entry.files:
        if path.suffix in names:
            store.put(path, names[path.suffix])
    store.write(_MANIFEST, json.dumps(manifest | {"files": names}, ensure_ascii=False))
