"""Read a CSV as Arrow record batches in which every column is text. Raises DataError with the line of a problem.

Agrees with pandas on files that both accept: blank lines (and lines of white space) are not rows, a quote is special
only at the start of a field, and a column without a name is called ``Unnamed: 0``. Unlike pandas, ``NA``, ``None``,
``null`` and the empty field are text, not missing values, and a row with too few fields is an error. Fields are
separated by commas, or by the first of SEPARATORS at which the header splits.

Line numbers, for error messages, come from Python's csv module, which agrees with pyarrow and pandas on what a record
is. It takes about a second per million rows.
"""

from __future__ import annotations

import csv
import io
import logging
import secrets
import shlex
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.csv

from harness.data.table.source import BROKEN, open_bytes
from harness.errors import DataError, listed, plural, remedy

log = logging.getLogger("harness")

BLOCK_BYTES, MAX_BLOCK_BYTES = 4 << 20, 256 << 20  # a record must fit into one block
MAX_HEADER_BYTES = 1 << 20
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}


def read_header(path: Path, name: str, needed: Iterable[str] = ()) -> list[str]:
    """Return the column names, in order. Raises DataError if there are none or two are equal."""
    try:
        _, raw = _header_of(path)
    except UnicodeDecodeError:
        raise _not_utf8(path, name) from None
    except OverflowError:
        message = f"the first line, which names the columns, is longer than {MAX_HEADER_BYTES >> 20} MiB"
        hint = f"keep only the columns that are used: cut -d, -f1,2 {shlex.quote(name)} > few_columns.csv"
        raise DataError(message, where=f"{name}:1", hint=hint) from None
    except BROKEN as error:
        raise _broken(error, name) from error
    if not "".join(raw).strip():
        raise DataError("the file has no header line", where=name, hint="the first line must name the columns")
    names = [column if column.strip() else f"Unnamed: {i}" for i, column in enumerate(raw)]
    if twice := sorted(column for column, count in Counter(names).items() if count > 1):
        raise DataError(
            f"the header names a column twice: {listed(twice)}",
            where=f"{name}:1",
            hint="give every column a unique name",
        )
    return names


def read_batches(path: Path, name: str, columns: list[str]) -> Generator[pa.RecordBatch, None, None]:
    """Yield the rows in order, in nonempty batches of any length. ``columns`` is the result of ``read_header``."""
    block_bytes, num_rows = BLOCK_BYTES, 0
    separator, _ = _header_of(path)
    if separator != ",":
        log.warning("%s: read with %s between the columns, as in its header", name, SEPARATORS[separator])
    while True:
        skip = num_rows
        try:
            for batch in _read(path, name, columns, block_bytes):
                fresh = batch.slice(min(skip, batch.num_rows))
                skip -= batch.num_rows - fresh.num_rows
                num_rows += fresh.num_rows
                if fresh.num_rows:
                    yield fresh
            return
        except _RecordTooLong:
            _check_quotes(path, name, columns)
            block_bytes *= 8
            if block_bytes > MAX_BLOCK_BYTES:
                limit = f"{MAX_BLOCK_BYTES >> 20} MiB"
                raise DataError(f"a row is longer than {limit}", where=name, hint="check for a missing quote") from None
            log.info("%s: a row is long: reading the file again, in blocks of %d MiB", name, block_bytes >> 20)


class _RecordTooLong(Exception):
    """A record does not fit into a block, so the file must be read again in larger ones."""


class _NulByte(Exception):
    """The file has a byte 0, after which pyarrow loses rows at the edges of blocks."""


class _Ended(io.RawIOBase):
    """The bytes of a file followed by one more record, in blocks that never end in a carriage return.

    pyarrow drops a line feed at the start of a block, taking it for the second half of a line end, even if the first
    half was inside quotes.
    """

    def __init__(self, stream: BinaryIO, ending: bytes) -> None:
        self.stream, self.ending, self.kept = stream, ending, b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        more = self.stream.read(size - len(self.kept))
        if b"\0" in more:
            raise _NulByte
        block = self.kept + more if self.kept else more  # no copy of a block in the usual case
        self.kept = b""
        if len(block) < size:
            block, self.ending = block + self.ending, b""
        elif block.endswith(b"\r"):
            block, self.kept = block[:-1], b"\r"
        return block


def _read(path: Path, name: str, columns: list[str], block_bytes: int) -> Generator[pa.RecordBatch, None, None]:
    """Yield the rows, read in blocks of this length. Raises DataError or _RecordTooLong.

    pyarrow silently lets an unclosed quote swallow the rest of the file. So one more record with a random content is
    appended; if it does not come out as the last row, a quote has swallowed it.
    """
    mark = secrets.token_hex(16)
    uneven: list[str] = []

    def on_uneven(row: pa.csv.InvalidRow) -> str:
        if not row.text.strip():
            return "skip"
        uneven.append(row.text)
        return "error"

    previous: pa.RecordBatch | None = None
    separator, header = _header_of(path)
    as_text = pa.csv.ConvertOptions(column_types=dict.fromkeys(header, pa.string()))  # of a column without a name, too
    try:
        with open_bytes(path) as stream:
            ending = "\n" + separator.join([mark] * len(columns)) + "\n"
            options = pa.csv.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=on_uneven)
            for batch in _open(_Ended(stream, ending.encode()), block_bytes, columns, options, as_text):
                if batch.num_rows:
                    if previous is not None:
                        yield previous
                    previous = batch
    except _NulByte:
        hint = f"copy the file again, or remove the bytes: tr -d '\\000' < {shlex.quote(name)} > without_nul.csv"
        raise DataError("the file has a NUL byte (0x00)", where=f"{name}:{_nul_line(path)}", hint=hint) from None
    except pa.ArrowInvalid as error:
        raise _diagnose(path, name, columns, str(error), bool(uneven)) from error
    except BROKEN as error:
        raise _broken(error, name) from error
    last = previous.slice(previous.num_rows - 1).to_pylist()[0] if previous is not None else {}
    if previous is None or set(last.values()) != {mark}:
        _check_quotes(path, name, columns)
        raise DataError("the end of the file cannot be parsed", where=name, hint="check for a missing quote")
    yield previous.slice(0, previous.num_rows - 1)


def _open(
    stream: _Ended, block_bytes: int, columns: list[str], options: pa.csv.ParseOptions, as_text: pa.csv.ConvertOptions
) -> Generator[pa.RecordBatch, None, None]:
    reader = pa.csv.open_csv(
        stream,
        # The names come from read_header, because pyarrow merges two columns without a name.
        # Threads only slow the stream down: it is parsed block by block anyway.
        read_options=pa.csv.ReadOptions(block_size=block_bytes, use_threads=False),
        parse_options=options,
        convert_options=as_text,
    )
    for batch in reader:
        yield pa.RecordBatch.from_arrays(batch.columns, names=columns)


def _diagnose(path: Path, name: str, columns: list[str], message: str, uneven: bool) -> Exception:
    """Return the error for what pyarrow could not parse, with the line and the reason."""
    if "straddling" in message or "block size" in message:
        return _RecordTooLong()
    if "UTF8" in message:
        return _not_utf8(path, name)
    try:
        _check_quotes(path, name, columns)
    except DataError as error:
        return error
    count, first = _uneven_records(path, len(columns), limit=5) if uneven else (0, [])
    if not count:
        return DataError(f"the CSV cannot be parsed: {message}", where=name)
    examples = ", ".join(f"line {line} has {fields}" for line, fields in first)
    return DataError(
        f"{plural(count, 'row')} with more or fewer fields than the header's {len(columns)}: {examples}"
        + (", …" if count > len(first) else ""),
        where=f"{name}:{first[0][0]}",
        hint=f"put a field that contains {_header_of(path)[0]!r} into double quotes; leave a missing field empty",
    )


def _check_quotes(path: Path, name: str, columns: list[str]) -> None:
    line = _unclosed_quote(path, len(columns))
    if line is not None:
        raise DataError(
            "a quote opened in this row is never closed, so it consumes the rest of the file",
            where=f"{name}:{line}",
            hint='close the quote, or double a quote inside a quoted field: "a 5"" pipe"',
        )


def _broken(error: Exception, name: str) -> DataError:
    if isinstance(error, OSError) and error.strerror:
        return DataError(f"the file cannot be read to its end: {error.strerror}", where=name, hint=remedy(error))
    return DataError(
        f"the gzip file is damaged: {error}",
        where=name,
        hint=f"copy it again; gzip -t {shlex.quote(name)} checks whether it is intact",
    )


def _not_utf8(path: Path, name: str) -> DataError:
    line, problem = _bad_utf8(path) or (0, "it has an invalid byte")
    return DataError(
        f"the file is not UTF-8: {problem}",
        where=f"{name}:{line}" if line else name,
        hint=f"convert it: iconv -f LATIN1 -t UTF-8 {shlex.quote(name)} > utf8.csv",
    )


# Lines


def lines_of(path: Path, rows: Sequence[int]) -> list[int]:
    """Return the 1-based line on which each data row (0-based, ascending) starts; shorter if the file has fewer
    rows."""
    lines, row_numbers = list[int](), set(rows)
    with _records(path) as records:
        for row, (line, _) in enumerate(records, start=-1):  # the first record is the header
            if row in row_numbers:
                lines.append(line)
                if len(lines) == len(row_numbers):
                    break
    return lines


def _uneven_records(path: Path, num_columns: int, limit: int) -> tuple[int, list[tuple[int, int]]]:
    """Return (number of records with another number of fields, the first ``limit`` of them as (line, fields))."""
    count, first = 0, list[tuple[int, int]]()
    with _records(path) as records:
        for line, fields in records:
            if len(fields) != num_columns:
                count += 1
                if len(first) < limit:
                    first.append((line, len(fields)))
    return count, first


def _unclosed_quote(path: Path, num_columns: int) -> int | None:
    """Return the line of the record whose quote is still open at the end of the file; None if there is none."""
    # Append one more record: if it does not come out as a record, an open quote has swallowed it.
    end = ["\x1aend of file\x1a"] * num_columns
    last_line, last = 0, [""]
    with _records(path, ["\n", _header_of(path)[0].join(end) + "\n"]) as records:
        for last_line, last in records:  # noqa: B007
            pass
    return None if last == end else last_line


def _bad_utf8(path: Path) -> tuple[int, str] | None:
    """Return (line, description of the byte) of the first bytes that are not UTF-8; None if there are none."""
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                around = line[max(0, error.start - 20) : error.end + 20].decode("latin-1").strip()
                return number, f"byte 0x{line[error.start]:02x} (read as Latin-1, it is part of {around!r})"
    return None


def _nul_line(path: Path) -> int:
    """Return the line of the first byte 0, which the file must have."""
    with open_bytes(path) as stream:
        return next(number for number, line in enumerate(stream, start=1) if b"\0" in line)


def _header_of(path: Path) -> tuple[str, list[str]]:
    """Return (the separator of fields, the fields of the first record; [] if there is none in the first
    MAX_HEADER_BYTES).

    Raises UnicodeDecodeError, or OverflowError if no line ends there.
    """
    with open_bytes(path) as stream:
        head = stream.read(MAX_HEADER_BYTES)
    length = max(head.rfind(b"\n"), head.rfind(b"\r")) + 1 if len(head) == MAX_HEADER_BYTES else len(head)
    if head and not length:
        raise OverflowError
    with _any_field_size():
        text = head[:length].decode("utf-8-sig").replace("\0", "")
        for separator in SEPARATORS:
            rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
            if len(fields := next(filter(None, rows), [])) > 1:
                return separator, fields
    return ",", fields


@contextmanager
def _records(path: Path, more: Sequence[str] = ()) -> Iterator[Iterator[tuple[int, list[str]]]]:
    """Open a CSV, followed by the lines ``more``, as (line, fields) of each record that is not a blank line."""

    def records(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        # The csv module of Python 3.10 stops at a NUL.
        reader, line = csv.reader((line.replace("\0", "") for line in lines), delimiter=separator), 1
        for fields in reader:
            if len(fields) == len(header) > 1 or fields and not separator.join(fields).isspace():
                yield line, fields
            line = reader.line_num + 1

    separator, header = _header_of(path)
    # Latin-1 decodes every byte, so a wrong encoding cannot fail here; quotes and line ends are ASCII in UTF-8.
    with _any_field_size(), open_bytes(path) as stream, io.TextIOWrapper(stream, "latin-1", newline="") as text:
        yield records(chain(text, more))


@contextmanager
def _any_field_size() -> Iterator[None]:
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)
