"""Writers of the files of a converted table: text as Arrow record batches, labels as codes or numbers."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.data.table.blocks import BlockWriter, array_digests
from harness.data.table.labels import BadRows, LabelCoder, LabelColumns, LabelFacts, Places
from harness.errors import DataError

MAX_BATCH_ROWS = 65_536
_BATCH_BYTES = 1 << 20  # intended size of a record batch, which is checked as a whole when a row of it is first read
_CHUNK_CODES = 1 << 20
_LARGEST = 3.4e38  # of a float32, which a model computes with


class TextWriter:
    """Writes text columns in record batches of equal length, and hashes their content on the way.

    Only the last batch is shorter, so row i is in batch i // batch_rows.
    """

    def __init__(self, path: Path, columns: list[str], name: str) -> None:
        self.name = name
        self.batch_rows = 0  # set by the first rows
        self._schema = pa.schema([(column, pa.string()) for column in columns])
        self._pieces: list[pa.RecordBatch] = []
        self._num_pending = 0
        self._digests = [hashlib.sha256() for _ in range(2 * len(columns))]
        self._hashing = ThreadPoolExecutor(1)  # hashing releases the interpreter and takes a third of the time
        self._hashed = self._hashing.submit(self._hash, [])  # of the last batch: at most one waits in memory
        self._file = BlockWriter(path)
        self._writer = pa.ipc.new_file(self._file, self._schema)
        self._file.end_block()

    def add(self, batch: pa.RecordBatch) -> None:
        """Append rows; columns other than those given at the start are ignored."""
        if not self._schema.names:  # a table that has only labels
            return
        batch = pa.RecordBatch.from_arrays([batch.column(n) for n in self._schema.names], schema=self._schema)
        if not self.batch_rows:
            self.batch_rows = _rows_per_batch(batch)
        while batch.num_rows:
            piece = batch.slice(0, self.batch_rows - self._num_pending)
            batch = batch.slice(piece.num_rows)
            self._pieces.append(piece)
            self._num_pending += piece.num_rows
            if self._num_pending == self.batch_rows:
                self._flush()

    def finish(self) -> str:
        """Write the remaining rows. Returns the digest of all text, which does not depend on batch lengths."""
        if self._num_pending:
            self._flush()
        self._hashed.result()
        self._writer.close()
        self._file.end_block()
        self.close()
        return hashlib.sha256(b"".join(digest.digest() for digest in self._digests)).hexdigest()

    def digests(self) -> dict[str, Any]:
        """Return the digests of the file's blocks: schema, record batches, footer."""
        return self._file.digests()

    def close(self) -> None:
        self._hashing.shutdown()
        self._file.close()

    def _flush(self) -> None:
        try:
            arrays = [pa.concat_arrays([p.column(i) for p in self._pieces]) for i in range(len(self._schema))]
        except pa.ArrowInvalid as error:
            rows = f"{self._num_pending:,} consecutive rows"
            raise DataError(f"{rows} have more than 2 GiB of text in one column", where=self.name) from error
        self._hashed.result()
        self._hashed = self._hashing.submit(self._hash, arrays)
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._file.end_block()
        self._pieces, self._num_pending = [], 0

    def _hash(self, arrays: list[pa.Array]) -> None:
        for i, array in enumerate(arrays):
            lengths, text = _text_bytes(array)
            self._digests[2 * i].update(lengths.data)
            self._digests[2 * i + 1].update(text)


class LabelWriter(Protocol):
    """Writes the labels of a table: ``add`` each batch of rows, then ``finish``, and ``close`` in any case."""

    bad_means: str
    """What is wrong with the rows in ``bad``, where {column} is their column."""
    remedy: str
    """What to do about them."""
    label: LabelColumns
    bad: BadRows

    def add(self, batch: pa.RecordBatch) -> None:
        """Append the labels of the next rows."""
        ...

    def finish(self) -> LabelFacts:
        """Complete the files; return the facts of the labels. Raises DataError if there is nothing to learn."""
        ...

    def close(self) -> None: ...


class CodeWriter:
    """Writes label codes in order of appearance, and at the end replaces them by indices in the sorted vocabulary."""

    bad_means = "without a label in column {column}"
    remedy = "fill in the labels or remove the rows; no setting skips them"

    def __init__(self, path: Path, label: LabelColumns, where: str, places: Places) -> None:
        self.path, self.label = path, label
        self.coder = LabelCoder(label.columns[0], where, places, label.setting)
        self.bad = self.coder.blank
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close

    def add(self, batch: pa.RecordBatch) -> None:
        self._file.write(self.coder.add(batch.column(self.coder.column)).astype("<i4", copy=False).data)

    def finish(self) -> LabelFacts:
        self._file.close()
        vocabulary, index, notes = self.coder.finish()
        with open(self.path, "r+b", buffering=0) as file:
            while len(codes := np.fromfile(file, "<i4", _CHUNK_CODES)):
                final = index[codes].astype("<i4", copy=False).data
                file.seek(-final.nbytes, os.SEEK_CUR)
                file.write(final)
        blocks = {"codes": array_digests(self.path, 4)}
        return LabelFacts(vocabulary=vocabulary, notes=notes, mean=[], std=[], blocks=blocks)

    def close(self) -> None:
        self._file.close()


class TagWriter(CodeWriter):
    """Writes the codes of all labels of each row, and in a second file where each row begins.

    White space around a label, empty parts (as after a last separator) and repeated labels of a row are left out.
    """

    remedy = "fill in the labels, remove the rows, or set task.labels.empty=allow if these rows really have no label"

    def __init__(self, path: Path, offsets: Path, label: LabelColumns, where: str, places: Places) -> None:
        super().__init__(path, label, where, places)
        self.bad, self._offsets_path = BadRows(), offsets
        self._offsets = open(offsets, "wb")  # noqa: SIM115 - closed by close
        self._end = 0
        self._write_offsets(np.zeros(1, np.int64))

    def add(self, batch: pa.RecordBatch) -> None:
        parts = pc.split_pattern(batch.column(self.coder.column), pattern=self.label.separator)
        labels = pc.utf8_trim_whitespace(parts.flatten())
        owners = np.repeat(np.arange(len(parts)), pc.list_value_length(parts).to_numpy(zero_copy_only=False))
        filled = pc.not_equal(labels, "").to_numpy(zero_copy_only=False)
        first_row = self.coder.num_rows
        codes = self.coder.add(labels.filter(pa.array(filled)), owners[filled], len(parts))
        once = np.unique(owners[filled].astype(np.int64) << 32 | codes)  # by row, then by code
        counts = np.bincount(once >> 32, minlength=len(parts))
        if not self.label.allow_empty:
            self.bad.add(first_row + np.flatnonzero(counts == 0))
        self._file.write((once & 0xFFFFFFFF).astype("<i4").data)
        self._write_offsets(self._end + np.cumsum(counts))
        self._end += len(once)

    def _write_offsets(self, offsets: np.ndarray) -> None:
        self._offsets.write(offsets.astype("<i8").data)

    def finish(self) -> LabelFacts:
        self._offsets.close()
        found = super().finish()
        if not found["vocabulary"] and not self.bad.count:
            raise DataError(f"no row has a label in column {self.coder.column!r}", where=self.coder.where)
        found["blocks"]["offsets"] = array_digests(self._offsets_path, 8)
        return found

    def close(self) -> None:
        super().close()
        self._offsets.close()


class NumberWriter:
    """Writes float64 numbers (rows, columns), and their mean and standard deviation per column."""

    bad_means = "with a value that is not a finite number in {column}"
    remedy = "write plain numbers such as 1.5 or -2e3 (no units, no thousands separators), or remove the rows"

    def __init__(self, path: Path, label: LabelColumns, where: str) -> None:
        self.path, self.label, self.where = path, label, where
        self.bad, self.num_rows = BadRows(), 0
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close

    def add(self, batch: pa.RecordBatch) -> None:
        texts = [pc.utf8_trim_whitespace(batch.column(name)) for name in self.label.columns]
        numbers = np.stack([_numbers(text) for text in texts], axis=1)
        wrong = ~(np.abs(numbers) < _LARGEST)  # true for NaN, too
        rows = wrong.any(axis=1).nonzero()[0]
        self.bad.add(self.num_rows + rows, [texts[wrong[row].argmax()][row].as_py() for row in rows[:5]])
        self._file.write(np.ascontiguousarray(numbers, "<f8").data)
        self.num_rows += batch.num_rows

    def finish(self) -> LabelFacts:
        """As of ``LabelWriter``. Sums are exact, so the result is the same on every machine."""
        self._file.close()
        numbers = np.memmap(self.path, "<f8", "r").reshape(-1, len(self.label.columns))
        means, deviations, notes = [], [], []
        for name, column in zip(self.label.columns, numbers.T, strict=True):
            mean = math.fsum(column) / len(column)
            constant = column.min() == column.max()  # of which the mean may be rounded
            deviation = 0.0 if constant else math.sqrt(math.fsum(np.square(column - mean)) / len(column))
            if not deviation:
                notes.append(f"all numbers in column {name!r} are {column[0]:g}: there is nothing to learn from them")
            means.append(mean)
            deviations.append(deviation or 1.0)
        blocks = {"codes": array_digests(self.path, 8 * len(self.label.columns))}
        return LabelFacts(vocabulary=[], notes=notes, mean=means, std=deviations, blocks=blocks)

    def close(self) -> None:
        self._file.close()


def _numbers(texts: pa.Array) -> np.ndarray:
    """Return ``float64`` numbers; NaN for text that is not a number."""
    try:
        numbers: np.ndarray = texts.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        import pandas as pd  # late: it takes as long as all other imports of the conversion

        numbers = pd.to_numeric(texts.to_pandas(), errors="coerce").to_numpy(np.float64)
    return numbers


def label_writer(label: LabelColumns, new_file: Callable[[str], Path], where: str, places: Places) -> LabelWriter:
    """Return the writer of labels of this kind, into what ``new_file`` returns for "codes" and "offsets"."""
    if label.kind == "numbers":
        return NumberWriter(new_file("codes"), label, where)
    if label.kind == "tags":
        return TagWriter(new_file("codes"), new_file("offsets"), label, where, places)
    return CodeWriter(new_file("codes"), label, where, places)


def _text_bytes(array: pa.StringArray) -> tuple[np.ndarray, memoryview]:
    """Return (length of each value in bytes, the bytes of all values)."""
    _, offsets_buffer, data = array.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[array.offset : array.offset + len(array) + 1]
    content = memoryview(data)[offsets[0] : offsets[-1]] if data is not None else memoryview(b"")
    return np.diff(offsets), content


def _rows_per_batch(first: pa.RecordBatch) -> int:
    fitting = max(64, _BATCH_BYTES * first.num_rows // max(1, first.nbytes))
    return min(MAX_BATCH_ROWS, 1 << (int(fitting).bit_length() - 1))
