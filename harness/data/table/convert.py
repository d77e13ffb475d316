"""Convert a CSV or Parquet file into files of the cache that table.py maps, as a stream with constant memory.

    CACHE/tables/NAME-HASH/KEY.arrow      text columns, Arrow IPC in record batches of equal length
    CACHE/tables/NAME-HASH/KEY.codes      labels in row order: codes as little-endian int32, or numbers as float64
    CACHE/tables/NAME-HASH/KEY.offsets    if rows have several labels: the first code of each row, and the end, as int64
    CACHE/tables/NAME-HASH/KEY.json       the manifest, written last, with the digests of the blocks of the other files,
                                          which are ignored without it
    CACHE/tables/NAME-HASH/VERSION.source a downloaded remote file

KEY is VERSION-LABELS. One process converts while the others wait for its lock. Machines that share the cache may not
see each other's locks. Their temporary names differ, both write the same, and the last one wins.

The cache may be deleted at any time: open tables stay open, anything else is converted again. Converting a new version
of a source deletes old ones that are older than a day.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from harness.data.table.header import Text, needed_columns, require_header
from harness.data.table.labels import LabelColumns, LabelFacts
from harness.data.table.source import Source, kind_of, reader_of
from harness.errors import DataError
from harness.runs.console import Work, working
from harness.runs.fetch import fetched, made_once
from harness.runs.files import cache_folder, read_sealed, replacing, write_sealed

if TYPE_CHECKING:
    import pyarrow as pa

    from harness.data.table.writers import LabelWriter, TextWriter

log = logging.getLogger("harness")

FORMAT = 8  # increase it when the layout or the meaning of anything in the cache changes
OLD_S = 86400.0  # after which the files of another version are deleted: a process may be about to map newer ones
_READ_AHEAD = 4  # batches


class Manifest(LabelFacts):
    """The facts of a converted table, as JSON."""

    columns: list[str]
    num_rows: int
    label: object
    """The ``key`` of its LabelColumns."""
    text_digest: str
    batch_rows: int
    """Of each record batch of text but the last."""
    kind: str
    """The format of the source."""
    digest: str
    bytes: dict[str, int]
    """The size of each file."""


@dataclass(frozen=True)
class CacheEntry:
    """The files of one conversion: one source, in one version, with one choice of label columns."""

    folder: Path
    version: str
    labels: str

    @classmethod
    def of(cls, source: Source, label: LabelColumns | None, cache_dir: Path | None) -> CacheEntry:
        stem = re.sub(r"[^\w.-]", "_", Path(source.identity).name)[:40]
        folder = cache_folder(cache_dir) / "tables" / f"{stem}-{_short(source.identity)}"
        return cls(folder, _short([FORMAT, source.version]), _short(label.key if label else None))

    def file(self, kind: str) -> Path:
        return self.folder / f"{self.version}-{self.labels}.{kind}"

    @property
    def download(self) -> Path:
        """The local copy of a remote source."""
        return self.folder / f"{self.version}.source"

    def load(self) -> Manifest | None:
        """Return the manifest if the entry is complete.

        Sizes are checked because mapping a truncated file ends in SIGBUS; the rest of the content is checked when it is
        used.
        """
        try:
            manifest: Manifest = read_sealed(self.file("json"))
            is_complete = all(self.file(kind).stat().st_size == size for kind, size in manifest["bytes"].items())
        except (OSError, ValueError):
            return None
        return manifest if is_complete else None

    def discard(self) -> None:
        """Remove a damaged conversion, not the download. Processes keep the files that they have mapped."""
        for path in map(self.file, ("json", "arrow", "codes", "offsets")):
            with contextlib.suppress(OSError):
                path.unlink()

    def sweep(self) -> None:
        """Delete old files of other versions of the source, and of conversions that were killed."""
        for path in self.folder.iterdir():
            if not path.name.startswith(self.version) or path.suffix == ".tmp":
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > OLD_S:
                        path.unlink()


def _short(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def converted(source: Source, entry: CacheEntry, text: Text, label: LabelColumns | None) -> Manifest:
    """Return the manifest of ``entry``, converting ``source`` first unless the table is in the cache. Raises
    DataError."""
    if manifest := entry.load():
        return manifest
    log.info("%s: converting it, once for its content and labels, into %s", source.name, entry.folder)
    with made_once(entry.file("json")):
        if manifest := entry.load():  # by another process
            return manifest
        if entry.file("json").exists():
            log.warning("%s: the converted table in the cache is damaged; converting it again", source.name)
            entry.discard()
        try:
            return convert(source, entry, text, label)
        except OSError:
            _require_unchanged(source, entry.download)
            raise  # of the cache


def convert(source: Source, entry: CacheEntry, text: Text, label: LabelColumns | None) -> Manifest:
    """Convert ``source`` into ``entry``, and return the manifest.

    Raises DataError if the content is unusable or the file changes meanwhile, or OSError if the cache cannot be
    written; the entry then has no files.
    """
    from harness.data.table.writers import TextWriter, label_writer  # late: a converted table needs neither

    source.settle()
    path = fetched(source.identity, entry.download) if source.is_remote else Path(source.identity)
    kind = kind_of(path, source.name)
    reader, mark = reader_of(kind), secrets.token_hex(8)
    columns = require_header(path, source.name, needed_columns(text, label))
    with contextlib.ExitStack() as stack:

        def new_file(ending: str) -> Path:
            return stack.enter_context(replacing(entry.file(ending), mark))

        # A single label is text already, in the vocabulary. Other labels are kept as they are written, too.
        left_out = label.columns if label and label.kind == "class" else ()
        texts = TextWriter(new_file("arrow"), [column for column in columns if column not in left_out], source.name)
        stack.enter_context(contextlib.closing(texts))
        lines_of = partial(reader.lines_of, path)
        labels = None
        if label:
            labels = label_writer(label, new_file, source.name, lambda rows: _places(lines_of(rows), rows))
        if labels is not None:
            stack.enter_context(contextlib.closing(labels))
        with working(f"converting {source.name}", "rows") as work:
            num_rows = _write_rows(texts, labels, reader.read_batches(path, source.name, columns), work)
        if not num_rows:
            raise DataError(
                "the file has a header but no rows", where=source.name, hint="check that it was written completely"
            )
        if labels is not None:
            _require_labels(labels, num_rows, source.name, lines_of)
        manifest = _manifest(texts, labels, columns, num_rows, kind)
        _require_unchanged(source, path)
    manifest["bytes"] = {ending: entry.file(ending).stat().st_size for ending in manifest["blocks"]}
    write_sealed(entry.file("json"), {**manifest}, mark)
    entry.sweep()
    return manifest


def _require_unchanged(source: Source, path: Path) -> None:
    """Raise DataError if ``source`` is no longer as it was located; remove ``path``, the copy of a remote one."""
    if not source.is_current():
        if source.is_remote:
            path.unlink(missing_ok=True)
        raise DataError(
            "the file changed while it was being read",
            where=source.name,
            hint="start again once it is complete; to replace a file safely, write to another name and rename it",
        )


def _write_rows(
    texts: TextWriter, labels: LabelWriter | None, batches: Generator[pa.RecordBatch, None, None], work: Work
) -> int:
    """Write all rows, and count them in ``work``; return their number."""
    # Closed explicitly, because after an error the traceback would keep the thread alive.
    with contextlib.closing(_read_ahead(batches)) as ahead:
        for batch in ahead:
            work.done += batch.num_rows
            if labels is not None:
                labels.add(batch)
            texts.add(batch)
    return work.done


def _read_ahead(batches: Generator[pa.RecordBatch, None, None]) -> Generator[pa.RecordBatch, None, None]:
    """Yield ``batches``, made in another thread: parsing takes as long as all else, and releases the interpreter."""
    with contextlib.closing(batches), ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as pool:
        waiting = deque(pool.submit(next, batches, None) for _ in range(_READ_AHEAD))
        try:
            while (batch := waiting.popleft().result()) is not None:
                waiting.append(pool.submit(next, batches, None))
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)


def _manifest(texts: TextWriter, labels: LabelWriter | None, columns: list[str], num_rows: int, kind: str) -> Manifest:
    """Return the facts about the rows. ``digest`` depends on the content only, not on how or where it is stored."""
    label_facts = LabelFacts(vocabulary=[], notes=[], blocks={}, mean=[], std=[]) if labels is None else labels.finish()
    manifest = Manifest(
        **label_facts, columns=columns, num_rows=num_rows, label=None if labels is None else labels.label.key,
        text_digest=texts.finish(), batch_rows=texts.batch_rows, kind=kind, digest="", bytes={},
    )  # fmt: skip
    parts = [manifest["columns"], num_rows, manifest["label"], manifest["vocabulary"], manifest["blocks"]]
    content = json.dumps([*parts, manifest["text_digest"]])  # the blocks are those of labels alone
    manifest["digest"] = hashlib.sha256(content.encode()).hexdigest()
    manifest["blocks"] = {"arrow": texts.digests(), **manifest["blocks"]}
    return manifest


def _require_labels(
    labels: LabelWriter, num_rows: int, name: str, lines_of: Callable[[Sequence[int]], list[int]]
) -> None:
    """Raise DataError if rows have no usable label."""
    bad = labels.bad
    if not bad.count:
        return
    lines = lines_of([row for row, _ in bad.first])
    places = _places(lines, [row for row, _ in bad.first])
    examples = ", ".join(place + text for place, (_, text) in zip(places, bad.first, strict=True))
    more = ", …" if bad.count > len(bad.first) else ""
    means = labels.bad_means.format(column=" or ".join(map(repr, labels.label.columns)))
    raise DataError(
        f"rows {means} ({bad.count} of {num_rows}): {examples}{more}",
        where=f"{name}:{lines[0]}" if lines else name,
        hint=labels.remedy if lines else f"{labels.remedy}; rows are counted from 0",
    )


def _places(lines: Sequence[int], rows: Sequence[int]) -> list[str]:
    """Return the ``lines`` of ``rows`` in words; of a format without lines, the numbers of the rows."""
    return [f"line {line}" for line in lines] or [f"row {row}" for row in rows]
