"""Line numbers in a CSV, for error messages.

Reads with Python's csv module, which agrees with pyarrow and pandas on what a record is: a quote is special only at the
start of a field, and blank lines are not records. Takes about a second per million rows.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.data.table.source import open_bytes

MAX_HEADER_BYTES = 1 << 20


def lines_of(path: Path, rows: Sequence[int]) -> list[int]:
    """The 1-based line on which each data row (0-based, ascending) starts; shorter if the file has fewer rows."""
    found, wanted = list[int](), set(rows)
    with _any_field_size(), _text(path) as text:
        for row, (line, _) in enumerate(_records(text), start=-1):  # the first record is the header
            if row in wanted:
                found.append(line)
                if len(found) == len(wanted):
                    break
    return found


def uneven_records(path: Path, num_columns: int, limit: int) -> tuple[int, list[tuple[int, int]]]:
    """(number of records with another number of fields, the first ``limit`` of them as (line, fields))."""
    count, first = 0, list[tuple[int, int]]()
    with _any_field_size(), _text(path) as text:
        for line, fields in _records(text):
            if len(fields) != num_columns:
                count += 1
                if len(first) < limit:
                    first.append((line, len(fields)))
    return count, first


def unclosed_quote(path: Path, num_columns: int) -> int | None:
    """The line of the record whose quote is still open at the end of the file; None if there is none."""
    # Append one more record: if it does not come out as a record, an open quote has swallowed it.
    end = ["\x1aend of file\x1a"] * num_columns
    with _any_field_size(), _text(path) as text:
        last_line, last = 0, [""]
        for last_line, last in _records(text, ["\n", ",".join(end) + "\n"]):  # noqa: B007
            pass
    return None if last == end else last_line


def bad_utf8(path: Path) -> tuple[int, str] | None:
    """(line, description of the byte) of the first bytes that are not UTF-8; None if there are none."""
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                around = line[max(0, error.start - 20) : error.end + 20].decode("latin-1").strip()
                return number, f"byte 0x{line[error.start]:02x} (read as Latin-1, it is part of {around!r})"
    return None


def header_of(path: Path) -> list[str]:
    """The fields of the first record; [] if there is none in the first MAX_HEADER_BYTES.

    Raises UnicodeDecodeError, or OverflowError if no line ends there.
    """
    with open_bytes(path) as stream:
        head = stream.read(MAX_HEADER_BYTES)
    whole = max(head.rfind(b"\n"), head.rfind(b"\r")) + 1 if len(head) == MAX_HEADER_BYTES else len(head)
    if head and not whole:
        raise OverflowError
    with _any_field_size():
        text = io.StringIO(head[:whole].decode("utf-8-sig").replace("\0", ""), newline="")
        return next((fields for fields in csv.reader(text) if fields), [])


def _records(text: Iterator[str], more: Sequence[str] = ()) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of each record that is not a blank line."""

    def lines() -> Iterator[str]:
        for line in text:
            yield line.replace("\0", "")  # the csv module of Python 3.10 stops at a NUL
        yield from more

    reader, line = csv.reader(lines()), 1
    for fields in reader:
        if len(fields) > 1 or (fields and not fields[0].isspace()):
            yield line, fields
        line = reader.line_num + 1


@contextmanager
def _text(path: Path) -> Iterator[io.TextIOWrapper]:
    # Latin-1 decodes every byte, so a wrong encoding cannot fail here; quotes and line ends are ASCII in UTF-8.
    with open_bytes(path) as stream, io.TextIOWrapper(stream, encoding="latin-1", newline="") as text:
        yield text


@contextmanager
def _any_field_size() -> Iterator[None]:
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)
