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
import importlib
import json
import logging
import re
import secrets
import shlex
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.config.places import is_url
from harness.data.table import csv_reader
from harness.data.table.labels import LabelColumns
from harness.data.table.source import Source, kind_of, locate, require_root
from harness.errors import DataError, listed, similar
from harness.runs.console import Work, working
from harness.runs.fetch import fetched, made_once
from harness.runs.files import cache_folder, read_sealed, replacing, write_sealed

if TYPE_CHECKING:
    import pyarrow as pa

    from harness.data.table.writers import LabelWriter, TextWriter

log = logging.getLogger("harness")

Text = Sequence[str] | Mapping[str, str]  # columns of text, perhaps each with the setting that names it
FORMAT = 7  # increase it when the layout or the meaning of anything in the cache changes
OLD_S = 86400.0  # after which the files of another version are deleted: a process may be about to map newer ones
_READ_AHEAD = 4  # batches


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

    def load(self) -> dict[str, Any] | None:
        """Return the manifest if the entry is complete.

        Sizes are checked because mapping a truncated file ends in SIGBUS; the rest of the content is checked when it is
        used.
        """
        try:
            manifest: dict[str, Any] = read_sealed(self.file("json"))
            whole = all(self.file(kind).stat().st_size == size for kind, size in manifest["bytes"].items())
        except (OSError, ValueError):
            return None
        return manifest if whole else None

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


def converted(source: Source, entry: CacheEntry, text: Text, label: LabelColumns | None) -> dict[str, Any]:
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


def convert(source: Source, entry: CacheEntry, text: Text, label: LabelColumns | None) -> dict[str, Any]:
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
        labels = label_writer(label, new_file, source.name, partial(_places, path, kind)) if label else None
        if labels is not None:
            stack.enter_context(contextlib.closing(labels))
        with working(f"converting {source.name}", "rows") as work:
            num_rows = _write_rows(texts, labels, reader.read_batches(path, source.name, columns), work)
        if not num_rows:
            raise DataError(
                "the file has a header but no rows", where=source.name, hint="check that it was written completely"
            )
        if labels is not None:
            _require_labels(labels, num_rows, source.name, path, kind)
        manifest = _manifest(texts, labels, columns, num_rows) | {"kind": kind}
        _require_unchanged(source, path)
    manifest["bytes"] = {kind: entry.file(kind).stat().st_size for kind in manifest["blocks"]}
    write_sealed(entry.file("json"), manifest, mark)
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


def reader_of(kind: str) -> ModuleType:
    """Return the module that reads files of ``kind``, imported."""
    return importlib.import_module(f"harness.data.table.{'parquet' if kind == 'parquet' else 'csv'}_reader")


def needed_columns(text: Text, label: LabelColumns | None) -> dict[str, str]:
    """Return {column: the setting that names it, or ""}."""
    named = text if isinstance(text, Mapping) else dict.fromkeys(text, "")
    return {**named, **dict.fromkeys(label.columns if label else (), label.setting if label else "")}


def problems(places: Iterable[str], needed: Mapping[str, str], root: str = "") -> Iterator[DataError]:
    """Yield the problems of the annotation files ``places``, as far as their headers show them, and of ``root``, to
    which paths in the rows are relative. URLs are not asked. A folder that does not exist is one problem."""
    absent: set[Path] = set()

    def require_file(place: str) -> None:
        folder = Path(place).absolute().parent
        if folder in absent:
            return
        if not folder.exists():
            absent.add(folder)
        require_header(Path(locate(place).identity), place, needed)

    def require_folder() -> None:
        if Path(root).absolute() not in absent:
            require_root(root)

    checks: list[Callable[[], None]] = [partial(require_file, place) for place in places if not is_url(place)]
    for check in [*checks, require_folder]:
        try:
            check()
        except DataError as error:
            yield error


def require_header(path: Path, name: str, needed: Mapping[str, str]) -> list[str]:
    """Return the columns of the file ``path``. Raises DataError unless all of ``needed`` are among them and can be
    text."""
    kind = kind_of(path, name)
    reader = reader_of(kind)
    columns: list[str] = reader.read_header(path, name)
    if kind == "parquet":
        reader.require_text(path, name, needed)
    require_columns(columns, needed, name)
    return columns


def require_columns(columns: Sequence[str], needed: Mapping[str, str], name: str) -> None:
    """Raise DataError unless all columns of ``needed``, {column: the setting that names it}, are among ``columns``."""
    missing = [column for column in needed if column not in columns]
    if not missing:
        return
    hints = [_instead(column, columns, needed) for column in missing]
    noun = "column" if len(missing) == 1 else "columns"
    raise DataError(
        f"no {noun} {', '.join(map(repr, missing))}; the columns are {listed(columns)}",
        where=name,
        hint="; ".join(filter(None, hints)),
    )


def _instead(column: str, columns: Sequence[str], needed: Mapping[str, str]) -> str:
    """Return the hint for ``column``, which does not exist; empty if there is nothing to suggest."""
    setting, near = needed[column], similar(column, columns)
    if not setting or list(needed.values()).count(setting) > 1:  # a list of columns
        meant = f"did you mean {near!r}? " if near else ""
        return f"{meant}{setting} names the columns" if setting else meant.strip()
    taken = {*needed, *(similar(other, columns) for other in needed if other not in columns)}
    left = [other for other in columns if other not in taken]
    word = near or (left[0] if len(left) == 1 else "NAME")
    option = setting.startswith("--")
    typed = f"{setting} {shlex.quote(word)}" if option else shlex.quote(f"{setting}={word}")
    return f"did you mean {typed}?" if near else f"{'use' if option else 'set'} {typed}"


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


def _manifest(texts: TextWriter, labels: LabelWriter | None, columns: list[str], num_rows: int) -> dict[str, Any]:
    """Return the facts about the rows. ``digest`` depends on the content only, not on how or where it is stored."""
    manifest: dict[str, Any] = {
        "columns": columns,
        "num_rows": num_rows,
        "label": None,
        "vocabulary": [],
        "text_digest": texts.finish(),
        "batch_rows": texts.batch_rows,
        "notes": [],
        "blocks": {},
    }
    if labels is not None:
        manifest |= {"label": labels.label.key, **labels.finish()}
    parts = ("columns", "num_rows", "label", "vocabulary", "blocks", "text_digest")  # the blocks of labels alone
    manifest["digest"] = hashlib.sha256(json.dumps([manifest[part] for part in parts]).encode()).hexdigest()
    manifest["blocks"] = {"arrow": texts.digests(), **manifest["blocks"]}
    return manifest


def _require_labels(labels: LabelWriter, num_rows: int, name: str, path: Path, kind: str) -> None:
    """Raise DataError if rows have no usable label."""
    bad = labels.bad
    if not bad.count:
        return
    places = _places(path, kind, [row for row, _ in bad.first])
    shown = ", ".join(place + found for place, (_, found) in zip(places, bad.first, strict=True))
    more = ", …" if bad.count > len(bad.first) else ""
    means = labels.bad_means.format(column=" or ".join(map(repr, labels.label.columns)))
    where, hint = f"{name}:{places[0].removeprefix('line ')}", labels.remedy
    if kind == "parquet":
        where, hint = name, f"{hint}; rows are counted from 0"
    raise DataError(f"rows {means} ({bad.count} of {num_rows}): {shown}{more}", where=where, hint=hint)


def _places(path: Path, kind: str, rows: Sequence[int]) -> list[str]:
    """Return the lines of ``rows``, in ascending order, in the file ``path``; of a Parquet file, their numbers."""
    if kind == "parquet":
        return [f"row {row}" for row in rows]
    return [f"line {line}" for line in csv_reader.lines_of(path, rows)]
