"""An annotation table: a CSV or Parquet file, converted once per cache folder and then memory-mapped by every process.

    table = open_table("train.csv", text=["path"], label="label")
    table.strings("path", rows), table.labels(rows), table.vocabulary

With other ``LabelColumns`` the labels of a row are several codes (``tags``) or numbers (``numbers``).

The first process to open a file converts it while others wait; afterwards opening takes milliseconds, and all processes
of a node share the memory. Rows count from 0. All ranks may open a table at the same time; to check that they got the
same one, compare ``digest``. labels.py defines what a label is, csv_reader.py how text is read, and source.py when a
file counts as changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from harness.data.table.blocks import CheckedArray, CheckedFile, DamagedError
from harness.data.table.convert import CacheEntry, Manifest, converted
from harness.data.table.header import Text, needed_columns, require_columns
from harness.data.table.labels import LabelColumns
from harness.data.table.source import Source, locate, reader_of
from harness.errors import DataError, plural

_FEW_ROWS = 100_000  # of a CSV whose lines are all found at once, in 0.1 s


def open_table(
    source: str | os.PathLike[str],
    *,
    text: Text = (),
    label: str | LabelColumns | None = None,
    cache_dir: Path | None = None,
) -> Table:
    """Open an annotation file, converting it first if no process has.

    ``source`` is a CSV, a gzipped CSV or a Parquet file, local or an fsspec URL. ``text`` names columns that must
    exist, perhaps each with the setting that names it, ``label`` the column of class labels, or other label columns;
    all columns are kept. ``cache_dir`` replaces the default of ``runs.files.default_cache_dir``. Raises DataError with
    the place and the remedy if the file or the cache cannot be used.
    """
    text = (text,) if isinstance(text, str) else text
    label = LabelColumns("class", (label,)) if isinstance(label, str) else label
    located = locate(source)
    entry = CacheEntry.of(located, label, cache_dir)
    manifest = converted(located, entry, text, label)
    require_columns(manifest["columns"], needed_columns(text, label), located.name)
    return Table(located, entry, manifest, label)


class Table:
    """The rows of an annotation file, from ``open_table``. Pickles as a path and is mapped again when unpickled."""

    def __init__(self, source: Source, entry: CacheEntry, manifest: Manifest, label: LabelColumns | None) -> None:
        self._source, self._entry, self._label = source, entry, label
        self._manifest = manifest
        self._map()
        self._lines: dict[int, int] = {}  # by row, of those that were needed, or of all of a small CSV
        self.num_rows: int = manifest["num_rows"]
        self.columns: tuple[str, ...] = tuple(manifest["columns"])
        self.label: str | None = manifest["label"] if isinstance(manifest["label"], str) else None
        self.mean: tuple[float, ...] = tuple(manifest["mean"])  # of each column of numbers, over all rows
        self.std: tuple[float, ...] = tuple(manifest["std"])
        self.digest: str = manifest["digest"]
        self.vocabulary: tuple[str | int, ...] = tuple(manifest["vocabulary"])
        self.notes: tuple[str, ...] = tuple(manifest["notes"])

    def _map(self) -> None:
        """Map the files: the cache may be emptied later."""
        blocks = self._manifest["blocks"]
        codes, offsets = (self._entry.file(kind) for kind in ("codes", "offsets"))
        with self._intact():
            self._texts = CheckedFile(self._entry.file("arrow"), blocks["arrow"])
            self._arrays = {}
            if self._manifest["mean"]:
                self._arrays["numbers"] = CheckedArray(codes, "<f8", len(self._manifest["mean"]), blocks["codes"])
            elif self._manifest["label"] is not None:
                self._arrays["codes"] = CheckedArray(codes, "<i4", None, blocks["codes"])
            if "offsets" in blocks:
                self._arrays["offsets"] = CheckedArray(offsets, "<i8", None, blocks["offsets"])
            self._texts.require(0)  # the schema
            self._texts.require(-1)  # the places of the record batches
        options = pa.ipc.IpcReadOptions(use_threads=False)  # nothing to decode, and a fork would lose the threads
        self._reader = pa.ipc.open_file(pa.py_buffer(self._texts.content), options=options)
        self._batches: dict[int, pa.RecordBatch] = {}

    @contextmanager
    def _intact(self) -> Iterator[None]:
        """Raise DataError if a block that is read in this context is damaged, and remove the table from the cache."""
        try:
            yield
        except FileNotFoundError:
            raise _vanished(self._source) from None
        except DamagedError as damage:
            self._entry.discard()
            raise DataError(
                f"the converted table in the cache is damaged: {damage}",
                where=self._source.name,
                hint="run the same command again, which converts the table anew; if this is repeated, set "
                "data.cache_dir to a folder on another disk",
            ) from None

    def _read(self, name: str, index: np.ndarray) -> np.ndarray:
        """Return ``index`` of the array ``name``."""
        with self._intact():
            return self._arrays[name][index]

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"Table({self._source.name!r}, {self.num_rows:,} rows, columns {', '.join(self.columns)})"

    def __getstate__(self) -> tuple[Source, CacheEntry, LabelColumns | None]:
        return self._source, self._entry, self._label

    def __setstate__(self, state: tuple[Source, CacheEntry, LabelColumns | None]) -> None:
        source, entry, label = state
        manifest = entry.load()
        if manifest is None:
            raise _vanished(source)
        self.__init__(source, entry, manifest, label)  # type: ignore[misc]

    def labels(self, rows: np.ndarray) -> np.ndarray:
        """Return the int64 codes (indices into ``vocabulary``) of these rows, in order. Raises IndexError."""
        if "codes" not in self._arrays or "offsets" in self._arrays:
            raise ValueError("the table was opened without a column of single labels")
        return self._read("codes", self._checked(rows)).astype(np.int64)

    def tags(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (number of labels of each of these rows, the int64 codes of all of them, row by row). Raises
        IndexError."""
        if "offsets" not in self._arrays:
            raise ValueError("the table was opened without a column of several labels")
        rows = self._checked(rows)
        starts = self._read("offsets", rows)
        counts = self._read("offsets", rows + 1) - starts
        shifts = starts - np.cumsum(counts) + counts  # from a place in the result to one in the file
        return counts, self._read("codes", np.repeat(shifts, counts) + np.arange(counts.sum())).astype(np.int64)

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """Return the float64 numbers (rows, columns) of these rows, in order. Raises IndexError."""
        if "numbers" not in self._arrays:
            raise ValueError("the table was opened without columns of numbers")
        return self._read("numbers", self._checked(rows))

    def strings(self, column: str, rows: np.ndarray) -> list[str]:
        """Return the text of a column in these rows, in order; labels as written in the file. Raises IndexError."""
        if column == self.label:
            return [str(self.vocabulary[code]) for code in self.labels(rows)]
        index = self._index_of(column)
        batches, slots = np.divmod(self._checked(rows), self._manifest["batch_rows"])
        return [self._batch(b).column(index)[s].as_py() for b, s in zip(batches.tolist(), slots.tolist(), strict=True)]

    def slice(self, column: str, start: int, stop: int) -> pa.ChunkedArray:
        """Return rows [start, stop) of a text column as a view of the mapped file, without a copy."""
        index, length, pieces = self._index_of(column), self._manifest["batch_rows"], []
        while start < min(stop, self.num_rows):
            pieces.append(self._batch(start // length).column(index).slice(start % length, stop - start))
            start += len(pieces[-1])
        return pa.chunked_array(pieces, pa.string())

    @property
    def name(self) -> str:
        """The path or the URL of the file."""
        return self._source.name

    @property
    def folder(self) -> str:
        """The folder of the file; empty if it is at a URL."""
        return "" if self._source.is_remote else os.path.dirname(self._source.name) or "."

    def where(self, row: int, quickly: bool = False) -> str:
        """Return the place of a row, for messages: ``train.csv:17``, or ``train.parquet, row 15 (from 0)``.

        Finding the line reads the CSV up to there, ``quickly`` only a short one. Parquet and changed files have none.
        """
        line = 0 if quickly and self.num_rows > _FEW_ROWS else self.find_lines([row]).get(row, 0)
        return f"{self._source.name}:{line}" if line else f"{self._source.name}, row {row} (from 0)"

    def find_lines(self, rows: Iterable[int]) -> dict[int, int]:
        """Return {row: line} with those of ``rows`` that have one, found in one pass, which ``where`` then knows."""
        remote = self._source.is_remote
        if not (remote or self._source.is_current()):
            return {}
        if unknown := sorted(set(rows) - self._lines.keys()):
            searched = unknown if self.num_rows > _FEW_ROWS else range(self.num_rows)
            path = self._entry.download if remote else Path(self._source.identity)
            with suppress(OSError, EOFError):
                self._lines |= zip(searched, reader_of(self._manifest["kind"]).lines_of(path, searched), strict=False)
        return self._lines

    def _batch(self, index: int) -> pa.RecordBatch:
        """Return a record batch, in the mapped file."""
        if index not in self._batches:
            with self._intact():
                self._texts.require(index + 1)  # after the schema
            self._batches[index] = self._reader.get_batch(index)
        return self._batches[index]

    def _index_of(self, column: str) -> int:
        index: int = self._reader.schema.get_field_index(column)
        if index < 0:
            raise KeyError(f"no text column {column!r}; the columns are {', '.join(self._reader.schema.names)}")
        return index

    def _checked(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and rows.view(np.uint64).max() >= self.num_rows:  # as uint64, a negative number is very large
            raise IndexError(
                f"rows {rows.min()} to {rows.max()} are out of range for a table of {plural(self.num_rows, 'row')}"
            )
        return rows


class TableRows:
    """A dataset of the rows of ``table``."""

    table: Table

    def row_name(self, row: int, quickly: bool = True) -> str:
        """Return the place of ``row``, for messages. ``quickly``: see ``Table.where``."""
        return self.table.where(row, quickly)


def _vanished(source: Source) -> DataError:
    hint = "the cache was emptied while it was in use: run the same command again"
    return DataError("the converted table is no longer in the cache", where=source.name, hint=hint)
