"""One process of a node converts a file, the others wait for it: a lock on a file, and no process group.

Whoever waits ends with what the converting process ended with: its table or its DataError. If that process dies, the
system frees its lock and the next in line converts.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.data.table.cache import Entry
from harness.data.table.convert import convert
from harness.data.table.source import Source
from harness.errors import DataError
from harness.runs.files import write_atomically

_POLL_S = 0.02
_POLLS_PER_LOCK = 10  # a look at the folder costs little, a try for the lock some of the processor the converter wants


def converted(
    source: Source, entry: Entry, text: Sequence[str], label: str | None, on_wait: Callable[[str], None] | None
) -> dict[str, Any]:
    """The manifest of ``entry``, which is complete when this returns. Raises DataError as ``convert`` does."""
    earlier_failure = _failure(entry)
    waited = False
    while (manifest := entry.load()) is None:
        lock = entry.try_lock()
        if lock is None:
            if on_wait is not None and not waited:
                on_wait(f"waiting while another process converts {source.name}")
            waited = True
            _pause(entry)
            continue
        try:
            if entry.load() is None:
                _raise_failure_since(earlier_failure, entry, text)
                _convert(source, entry, text, label)
        finally:
            lock.release()
    return manifest


def local_file(source: Source, entry: Entry) -> Path:
    """Where the bytes of the source lie on this machine; a remote file is downloaded first. Lock held."""
    if not source.is_remote:
        return Path(source.identity)
    from harness.data.table.remote import fetch

    path = entry.download(source)
    if not path.exists():
        fetch(source.identity, source.version, path)
    return path


def _convert(source: Source, entry: Entry, text: Sequence[str], label: str | None) -> None:
    entry.sweep(source)
    try:
        convert(source, local_file(source, entry), entry, text, label)
    except DataError as error:
        record = {"message": error.message, "where": error.where, "hint": error.hint}
        with contextlib.suppress(OSError):  # the disk may be full
            content = record | {"text": list(text), "attempt": secrets.token_hex(8)}
            write_atomically(entry.failure, json.dumps(content, ensure_ascii=False))
        raise


def _pause(entry: Entry) -> None:
    for _ in range(_POLLS_PER_LOCK):
        time.sleep(_POLL_S)
        if entry.manifest.exists():
            return


def _failure(entry: Entry) -> dict[str, Any] | None:
    try:
        failure: dict[str, Any] = json.loads(entry.failure.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return failure


def _raise_failure_since(earlier: dict[str, Any] | None, entry: Entry, text: Sequence[str]) -> None:
    """Do not repeat a conversion that failed while this process waited: eight ranks would take eight times as long."""
    failure = _failure(entry)
    if failure is not None and failure != earlier and failure["text"] == list(text):
        raise DataError(failure["message"], where=failure["where"], hint=failure["hint"])
