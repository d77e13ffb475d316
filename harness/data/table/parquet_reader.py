"""A Parquet file as a stream of Arrow record batches in which every column is text: the counterpart of csv_reader.

Numbers, dates and booleans are written as Arrow writes them (1.0 as ``1``, hence a label column of floats without a
fraction holds integers); a null becomes empty text. Columns that are no text at heart (binary, lists, structs) are left
out of the table, so that a file with images inside does not have to be copied.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from harness.errors import DataError

_BATCH_ROWS = 16_384


def read_header(path: Path, name: str) -> list[str]:
    """The names of the columns that can be text, in order; DataError if there are none or two are equal."""
    with _reading(name), pa.parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
    columns = [field.name for field in schema if _can_be_text(field.type)]
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise DataError(f"two columns have one name: {', '.join(map(repr, twice))}", where=name)
    if not columns:
        raise DataError(f"no column holds text or numbers; there are {', '.join(schema.names)}", where=name)
    return columns


def read_batches(path: Path, name: str, columns: list[str]) -> Generator[pa.RecordBatch, None, None]:
    """The rows in order, in batches of any length, never empty ones."""
    schema = pa.schema([(column, pa.string()) for column in columns])
    with _reading(name), pa.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
            if batch.num_rows:
                yield pa.RecordBatch.from_arrays([_as_text(batch.column(c)) for c in columns], schema=schema)


def _can_be_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _can_be_text(kind.value_type)
    no_text = (pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return not any(test(kind) for test in no_text) and not pa.types.is_null(kind)


def _as_text(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return pc.fill_null(column.cast(pa.string()), "")


class _reading:
    """Turns pyarrow's complaints about the file into a DataError."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (pa.ArrowException, OSError)):
            hint = "was it written completely?"
            raise DataError(f"the Parquet file cannot be read: {error}", where=self.name, hint=hint) from error
