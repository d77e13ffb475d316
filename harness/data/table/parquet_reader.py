"""Read a Parquet file as Arrow record batches in which every column is text: the counterpart of csv_reader.

Numbers, dates and booleans become the text that Arrow writes (1.0 becomes ``1``, so float labels without a fraction
become integers); a null becomes empty text. Binary, list and struct columns are left out, so images inside the file
are not copied.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from harness.errors import DataError, listed

_BATCH_ROWS = 16_384


def read_header(path: Path, name: str, needed: Iterable[str] = ()) -> list[str]:
    """Return the names of the columns that can be text, in order. Raises DataError if there are none, two are equal, or
    one of ``needed`` is in the file, but cannot be text."""
    with _reading(name), pa.parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
    columns = [field.name for field in schema if _can_be_text(field.type)]
    if twice := sorted(column for column, count in Counter(columns).items() if count > 1):
        message = f"the file names a column twice: {listed(twice)}"
        raise DataError(message, where=name, hint="give every column a unique name")
    if not columns:
        message = f"no column has text or numbers; the columns are {listed(schema.names)}"
        raise DataError(message, where=name, hint="store each label, and each path, as text or a number")
    types = {field.name: field.type for field in schema}
    for column in needed:
        if column in types and column not in columns:
            hint = "store it as text or numbers, or choose a different column"
            raise DataError(f"column {column!r} holds {types[column]}, not text or numbers", where=name, hint=hint)
    return columns


def lines_of(path: Path, rows: Sequence[int]) -> list[int]:
    """Return no lines."""
    return []


def read_batches(path: Path, name: str, columns: list[str]) -> Generator[pa.RecordBatch, None, None]:
    """Yield the rows in order, in nonempty batches of any length."""
    schema = pa.schema([(column, pa.string()) for column in columns])
    with _reading(name), pa.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
            if batch.num_rows:
                yield pa.RecordBatch.from_arrays([_as_text(batch.column(c), c, name) for c in columns], schema=schema)


def _can_be_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _can_be_text(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _can_be_text(kind.storage_type)
    types = pa.types
    no_text = (
        types.is_nested, types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view,
        types.is_null,
    )  # fmt: skip
    return not any(test(kind) for test in no_text)


def _as_text(column: pa.Array, column_name: str, name: str) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return pc.fill_null(column.cast(pa.string()), "")
    except pa.ArrowException as error:
        message = f"column {column_name!r} holds {column.type} that cannot become text: {error}"
        raise DataError(message, where=name, hint="store it as text or numbers, or leave it out of the file") from error


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Raise pyarrow's errors about the file as a DataError."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        hint = "check that it was written completely"
        raise DataError(f"the Parquet file cannot be read: {error}", where=name, hint=hint) from error
