"""Writers of the two files of a converted table: text as Arrow record batches, labels as int32 codes."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

from harness.data.table.labels import LabelCoder
from harness.errors import DataError

MAX_BATCH_ROWS = 65_536
_BATCH_BYTES = 16 << 20  # intended size of a record batch; long rows make it shorter than MAX_BATCH_ROWS
_CHUNK_CODES = 1 << 20


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
        self._hashing = ThreadPoolExecutor(
            max_workers=1
        )  # hashing releases the interpreter and takes a third of the time
        self._hashed: Future[None] | None = None  # of the last batch: at most one waits in memory
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close
        self._writer = pa.ipc.new_file(self._file, self._schema)

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
        self._writer.close()
        self.close()
        return hashlib.sha256(b"".join(digest.digest() for digest in self._digests)).hexdigest()

    def close(self) -> None:
        self._hashing.shutdown()
        self._file.close()

    def _flush(self) -> None:
        try:
            arrays = [pa.concat_arrays([p.column(i) for p in self._pieces]) for i in range(len(self._schema))]
        except pa.ArrowInvalid as error:
            rows = f"{self._num_pending:,} consecutive rows"
            raise DataError(f"{rows} have more than 2 GiB of text in one column", where=self.name) from error
        if self._hashed is not None:
            self._hashed.result()
        self._hashed = self._hashing.submit(self._hash, arrays)
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._pieces, self._num_pending = [], 0

    def _hash(self, arrays: list[pa.Array]) -> None:
        for i, array in enumerate(arrays):
            lengths, text = _text_bytes(array)
            self._digests[2 * i].update(lengths.data)
            self._digests[2 * i + 1].update(text)


class CodeWriter:
    """Writes label codes in order of appearance, and at the end replaces them by indices in the sorted vocabulary."""

    def __init__(self, path: Path, coder: LabelCoder) -> None:
        self.path, self.coder = path, coder
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close

    def add(self, batch: pa.RecordBatch) -> None:
        """Append the labels of the next rows."""
        self._file.write(self.coder.add(batch.column(self.coder.column)).astype("<i4", copy=False).data)

    def finish(self) -> tuple[list[str] | list[int], list[str], str]:
        """(vocabulary, notes, digest of the codes)."""
        self._file.close()
        vocabulary, index, notes = self.coder.finish()
        digest = hashlib.sha256()
        with open(self.path, "r+b", buffering=0) as file:
            while len(codes := np.fromfile(file, "<i4", _CHUNK_CODES)):
                final = index[codes].astype("<i4", copy=False).data
                file.seek(-final.nbytes, os.SEEK_CUR)
                file.write(final)
                digest.update(final)
        return vocabulary, notes, digest.hexdigest()

    def close(self) -> None:
        self._file.close()


def _text_bytes(array: pa.StringArray) -> tuple[np.ndarray, memoryview]:
    """(length of each value in bytes, the bytes of all values)."""
    _, offsets_buffer, data = array.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[array.offset : array.offset + len(array) + 1]
    content = memoryview(data)[offsets[0] : offsets[-1]] if data is not None else memoryview(b"")
    return np.diff(offsets), content


def _rows_per_batch(first: pa.RecordBatch) -> int:
    fitting = max(64, _BATCH_BYTES * first.num_rows // max(1, first.nbytes))
    return min(MAX_BATCH_ROWS, 1 << (int(fitting).bit_length() - 1))
