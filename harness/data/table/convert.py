"""Convert a CSV or Parquet file once into what table.py maps, as a stream: memory does not grow with the file.

Text columns go into an Arrow IPC file in record batches of equal length (only the last is shorter), so row i lies in
batch i // length; labels go into a plain file of int32 codes beside it. Everything else is in the manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness.data.table import csv_lines, csv_reader, parquet_reader
from harness.data.table.cache import FORMAT, Entry
from harness.data.table.labels import LabelCoder
from harness.data.table.prefetch import read_ahead
from harness.data.table.source import Source, kind_of, nearest
from harness.data.table.writers import CodeSink, TextSink
from harness.errors import DataError
from harness.runs.files import commit, temporary_for


def convert(source: Source, path: Path, entry: Entry, text: Sequence[str], label: str | None) -> None:
    """Convert ``path``, the local copy of ``source``, into ``entry``. Call it with the lock held.

    Raises DataError if the content cannot be used, the file changes meanwhile, or the cache cannot be written; then
    nothing is left behind.
    """
    kind = kind_of(path, source.name)
    reader = parquet_reader if kind == "parquet" else csv_reader
    columns = reader.read_header(path, source.name)
    require_columns(columns, text, label, source.name)
    temporary = {path: temporary_for(path) for path in (entry.arrow, entry.codes)}
    texts, labels = None, None
    try:
        with entry.writing():
            texts = TextSink(temporary[entry.arrow], [c for c in columns if c != label], source.name)
            if label is not None:
                labels = CodeSink(temporary[entry.codes], LabelCoder(label, source.name))
            manifest = _fill(texts, labels, reader.read_batches(path, source.name, columns), source, path)
            manifest |= {"kind": kind, "columns": columns, "bytes": [_size(p) for p in temporary.values()]}
            manifest["digest"] = _digest(manifest)
            if not source.is_remote and not source.is_current():
                hint = "start again once it is written; write to another name and rename it"
                raise DataError("the file changed while it was being read", where=source.name, hint=hint)
            for final, written in temporary.items():
                if written.exists():
                    commit(written, final)
            entry.publish(manifest | {"format": FORMAT, "source": source.identity, "version": source.version})
    finally:
        for sink in (texts, labels):
            if sink is not None:
                sink.abandon()
        for left in temporary.values():
            left.unlink(missing_ok=True)


def require_columns(columns: Sequence[str], text: Sequence[str], label: str | None, name: str) -> None:
    """DataError unless the table has all of these columns."""
    missing = [c for c in dict.fromkeys([*text, *([label] if label is not None else [])]) if c not in columns]
    if not missing:
        return
    hints = [nearest(column, columns) for column in missing]
    for separator, plural in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(columns) == 1 and separator in columns[0]:
            hints = [f"the columns seem to be separated by {plural}: save the file with commas"]
    raise DataError(
        f"no column {', '.join(map(repr, missing))}; there are {', '.join(map(repr, columns))}",
        where=name,
        hint="; ".join(filter(None, hints)) or "name one of these columns in the configuration",
    )


def _fill(
    texts: TextSink, labels: CodeSink | None, batches: Generator[pa.RecordBatch, None, None], source: Source, path: Path
) -> dict[str, Any]:
    """Write all rows; what the manifest says about them."""
    num_rows = 0
    # Parsing takes as long as all the rest together: it gets a core of its own. Closed here,
    # since after an error the traceback would keep the thread waiting.
    with contextlib.closing(read_ahead(batches)) as ahead:
        for batch in ahead:
            num_rows += batch.num_rows
            if labels is not None:
                labels.add(batch)
            texts.add(batch)
    if not num_rows:
        raise DataError("the file has a header but no rows", where=source.name, hint="was it written completely?")
    if labels is not None:
        _refuse_blank(labels.coder, path)
    manifest: dict[str, Any] = {"text_digest": texts.finish(), "num_rows": num_rows, "batch_rows": texts.batch_rows}
    manifest |= {"label": None, "vocabulary": [], "counts": [], "notes": [], "codes_digest": ""}
    if labels is not None:
        vocabulary, counts, notes, digest = labels.finish()
        manifest |= {"label": labels.coder.column, "vocabulary": vocabulary, "counts": counts.tolist()}
        manifest |= {"notes": notes, "codes_digest": digest}
    return manifest


def _refuse_blank(coder: LabelCoder, path: Path) -> None:
    if not coder.num_blank:
        return
    rows = coder.first_blank
    lines = csv_lines.lines_of(path, rows) if kind_of(path, coder.where) != "parquet" else []
    seen = [f"row {row}" + (f" (line {lines[i]})" if i < len(lines) else "") for i, row in enumerate(rows)]
    more = ", …" if coder.num_blank > len(rows) else ""
    raise DataError(
        f"{coder.num_blank} of {coder.num_rows} rows have no label in column {coder.column!r}: {', '.join(seen)}{more}",
        where=f"{coder.where}:{lines[0]}" if lines else coder.where,
        hint="fill these in or remove the rows; rows are counted from 0",
    )


def _digest(manifest: dict[str, Any]) -> str:
    """Of the content: what the rows are, not how or where they are stored."""
    parts = ("columns", "num_rows", "label", "vocabulary", "codes_digest", "text_digest")
    return hashlib.sha256(json.dumps([manifest[part] for part in parts]).encode()).hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
