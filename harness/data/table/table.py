"""An annotation table of any size: a CSV or Parquet file, converted once per node and then mapped by every process.

    table = open_table("train.csv", text=["path"], label="label")
    table.strings("path", rows), table.labels(rows), table.vocabulary

The first process to open a file converts it while others wait; afterwards opening takes milliseconds, and the
memory is shared by all processes of the node. Rows are counted from 0. All ranks may open the table at the same time;
whether they got the same one is theirs to check: compare ``digest``. What a label is, is said in labels.py; how text
is read, in csv_reader.py; what makes a file a new one, in source.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from harness.data.table import csv_lines
from harness.data.table.cache import Entry
from harness.data.table.convert import require_columns
from harness.data.table.single_conversion import converted
from harness.data.table.source import Source, locate
from harness.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

_FEW_ROWS = 512  # up to here one value after the other is faster than grouping rows by record batch


def open_table(
    source: str | os.PathLike[str],
    *,
    text: Sequence[str] = (),
    label: str | None = None,
    cache_dir: Path | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Table:
    """Open an annotation file; convert it first if nobody has.

    ``source`` is a CSV, a gzipped CSV or a Parquet file, local or an fsspec URL. ``text`` names columns that must be
    there, ``label`` the column of class labels; all columns are kept. ``cache_dir`` replaces the default of
    cache.default_cache_dir. ``on_wait`` is called once, with a sentence, if another process is converting the file.
    Raises DataError with the place and the remedy for whatever is wrong with the file or the cache.
    """
    text = (text,) if isinstance(text, str) else text
    found = locate(source)
    entry = Entry.of(found, label, cache_dir)
    manifest = converted(found, entry, text, label, on_wait)
    require_columns(manifest["columns"], text, label, found.name)
    return Table(found, entry, manifest)


class Table:
    """The rows of an annotation file, from ``open_table``. Pickles as a path; is mapped again where it arrives."""

    def __init__(self, source: Source, entry: Entry, manifest: dict[str, Any]) -> None:
        self._source, self.entry = source, entry
        self._manifest = manifest
        try:
            entry.hold(self)
        except FileNotFoundError:
            raise _vanished(source) from None
        self.num_rows: int = manifest["num_rows"]
        self.columns: tuple[str, ...] = tuple(manifest["columns"])
        self.label: str | None = manifest["label"]
        self.digest: str = manifest["digest"]
        self.vocabulary: tuple[str, ...] | tuple[int, ...] = tuple(manifest["vocabulary"])
        self.counts: np.ndarray = np.array(manifest["counts"], dtype=np.int64)
        self.notes: tuple[str, ...] = tuple(manifest["notes"])

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"Table({self._source.name!r}, {self.num_rows:,} rows, columns {', '.join(self.columns)})"

    def __getstate__(self) -> tuple[Source, Entry]:
        return self._source, self.entry

    def __setstate__(self, state: tuple[Source, Entry]) -> None:
        source, entry = state
        manifest = entry.load()
        if manifest is None:
            raise _vanished(source)
        self.__init__(source, entry, manifest)  # type: ignore[misc]

    def labels(self, rows: np.ndarray) -> np.ndarray:
        """The int64 codes (places in ``vocabulary``) of these rows, in their order; IndexError outside the table."""
        if self.label is None:
            raise ValueError("the table was opened without a label column")
        codes: np.ndarray = self._codes[self._checked(rows)]
        return codes.astype(np.int64)

    def strings(self, column: str, rows: np.ndarray) -> list[str]:
        """The text of one column in these rows, in their order; labels as they are written in the file."""
        if column == self.label:
            return [str(self.vocabulary[code]) for code in self.labels(rows)]
        place, rows = self._place(column), self._checked(rows)
        if len(rows) > _FEW_ROWS:
            return self._gather(place, rows).to_pylist()  # type: ignore[no-any-return]
        batches, slots = np.divmod(rows, self._manifest["batch_rows"])
        return [self._batch(b).column(place)[s].as_py() for b, s in zip(batches.tolist(), slots.tolist(), strict=True)]

    def view(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows ``start`` to ``stop`` of text columns (the label is none) as a view of the mapped file: no copy."""
        names = [c for c in self.columns if c != self.label] if columns is None else list(columns)
        places = [self._place(c) for c in names]
        schema = pa.schema([(c, pa.string()) for c in names])
        start, stop = max(0, start), min(stop, self.num_rows)
        length, pieces = self._manifest["batch_rows"], []
        while start < stop and places:
            batch = self._batch(start // length)
            piece = batch.slice(start % length, stop - start)
            pieces.append(pa.RecordBatch.from_arrays([piece.column(p) for p in places], schema=schema))
            start += piece.num_rows
        return pa.Table.from_batches(pieces, schema=schema)

    def chunks(self, column: str) -> Iterator[pa.Array]:
        """All values of a text column, one record batch of the mapped file after the other."""
        place = self._place(column)
        return (self._batch(index).column(place) for index in range(self._reader.num_record_batches))

    def slice_frame(self, start: int, stop: int) -> pd.DataFrame:
        """Rows ``start`` to ``stop`` as a DataFrame: text as str, labels as in ``vocabulary``."""
        start, stop = max(0, start), min(stop, self.num_rows)
        view = self.view(start, stop)
        return self._frame(view.column_names, view.columns, slice(start, max(start, stop)))

    def frame(self, rows: np.ndarray) -> pd.DataFrame:
        """These rows, in their order, as a DataFrame: text as str, labels as in ``vocabulary``."""
        rows = self._checked(rows)
        names = [c for c in self.columns if c != self.label]
        return self._frame(names, [self._gather(self._place(c), rows) for c in names], rows)

    def line_of(self, row: int) -> int:
        """The 1-based line of the CSV on which the row starts, for messages: reads the file again up to there.

        0 if there is none: the source is Parquet, or no longer what was converted.
        """
        remote = self._source.is_remote
        if self._manifest["kind"] == "parquet" or not (remote or self._source.is_current()):
            return 0
        path = self.entry.download(self._source) if remote else Path(self._source.identity)
        try:
            return (csv_lines.lines_of(path, [row]) or [0])[0]
        except (OSError, EOFError):
            return 0

    def where(self, row: int) -> str:
        """The place of a row for a message: ``train.csv:17``, or ``train.parquet, row 15``."""
        line = self.line_of(row)
        return f"{self._source.name}:{line}" if line else f"{self._source.name}, row {row}"

    @functools.cached_property
    def _codes(self) -> np.ndarray:
        # A plain array over the mapping: np.memmap objects are slower to index.
        return np.asarray(np.memmap(self.entry.codes, "<i4", "r"))

    @functools.cached_property
    def _reader(self) -> pa.ipc.RecordBatchFileReader:
        options = pa.ipc.IpcReadOptions(use_threads=False)  # nothing to decode, and no threads lost in a fork
        return pa.ipc.open_file(pa.memory_map(str(self.entry.arrow)), options=options)

    @functools.cached_property
    def _batches(self) -> dict[int, pa.RecordBatch]:
        return {}

    def _batch(self, index: int) -> pa.RecordBatch:
        """A record batch, still in the mapped file."""
        if index not in self._batches:
            self._batches[index] = self._reader.get_batch(index)
        return self._batches[index]

    def _place(self, column: str) -> int:
        place: int = self._reader.schema.get_field_index(column)
        if place < 0:
            raise KeyError(f"no text column {column!r}; there are {', '.join(self._reader.schema.names)}")
        return place

    def _checked(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and rows.view(np.uint64).max() >= self.num_rows:  # a negative one is a very large one
            raise IndexError(f"rows {rows.min()} to {rows.max()} are not all in a table of {self.num_rows} rows")
        return rows

    def _gather(self, place: int, rows: np.ndarray) -> pa.Array:
        """One column in any rows. Batch by batch: Table.take would copy the whole column first."""
        batches, slots = np.divmod(rows, self._manifest["batch_rows"])
        order = np.argsort(batches, kind="stable")
        starts = np.flatnonzero(np.diff(batches[order], prepend=-1))
        groups = np.split(order, starts[1:]) if len(rows) else []
        pieces = [self._batch(int(batches[g[0]])).column(place).take(pa.array(slots[g])) for g in groups]
        where_is = np.empty(len(rows), dtype=np.int64)
        where_is[order] = np.arange(len(rows))
        return pa.chunked_array(pieces, pa.string()).combine_chunks().take(pa.array(where_is))

    def _frame(self, names: list[str], arrays: list[Any], rows: slice | np.ndarray) -> pd.DataFrame:
        if self.label is not None:
            codes = pa.array(self._codes[rows])
            names = names.copy()
            names.insert(self.columns.index(self.label), self.label)
            arrays.insert(self.columns.index(self.label), pa.array(self.vocabulary).take(codes))
        return pa.Table.from_arrays(arrays, names=names).to_pandas()  # type: ignore[no-any-return]


def _vanished(source: Source) -> DataError:
    hint = "the cache was emptied while it was in use: start again"
    return DataError("the converted table is no longer in the cache", where=source.name, hint=hint)
