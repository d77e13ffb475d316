"""Reads ``metrics.jsonl`` as a table, whole or damaged. Torch is not needed."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness.errors import require_regular_file
from harness.runs.files import parse_json, read_bytes

_REAL, _WHOLE = pa.float64(), pa.int64()
_KNOWN = pa.schema(
    {"split": pa.string(), "step": _WHOLE, "epoch": _WHOLE, "samples": _WHOLE, "skipped": _WHOLE, "wall_s": _REAL,
     "loss": _REAL, "lr": _REAL, "loss_scale": _REAL, "samples_per_s": _REAL, "data_wait": _REAL}
)  # fmt: skip
_TAIL_BYTES = 1 << 16  # enough for the last line
_MAX_DEPTH = 64  # of nesting
_HALF = "metrics.jsonl ends mid-line: the run was killed during a write, or is still writing"


def read(path: Path) -> tuple[pa.Table, str]:
    """Return the file as a table, one row per line, and what is wrong with it. Keys that a line does not have are null;
    the columns of training lines always exist."""
    try:
        text = read_bytes(path)
    except FileNotFoundError:
        return _KNOWN.empty_table(), ""
    except OSError as error:
        return _KNOWN.empty_table(), f"metrics.jsonl cannot be read: {error.strerror}"
    *lines, last = text.split(b"\n")
    whole = not last or isinstance(_line(last), dict)
    return _table([*lines, last] if whole else lines, [] if whole else [_HALF])


def incomplete(path: Path) -> str:
    """Return the problem of a file that ends in mid-line; empty for any other."""
    try:
        require_regular_file(path)
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            last = file.read().rpartition(b"\n")[2]
    except OSError:
        return ""
    return _HALF if last and not isinstance(_line(last), dict) else ""


def _line(text: bytes) -> Any:
    """Return the value of a line; None if it is damaged, or cannot be a value of arrow."""
    try:
        value = parse_json(text)
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except ValueError:
        return None
    return None if _deep(text) else value


def _deep(text: bytes) -> bool:
    """Return True if ``text`` may be nested more deeply than arrow can take."""
    if text.count(b"{") + text.count(b"[") <= _MAX_DEPTH:
        return False
    return max(itertools.accumulate((byte in b"{[") - (byte in b"}]") for byte in text)) > _MAX_DEPTH


def _table(lines: list[bytes], problems: list[str]) -> tuple[pa.Table, str]:
    """Return the ``lines`` as a table, without damaged lines and values, and these with the ``problems`` before."""
    rows = [_line(line) for line in lines if line.strip()]
    good = [row for row in rows if isinstance(row, dict)]
    if len(good) < len(rows):
        problems.append(f"metrics.jsonl: damaged lines, which are left out: {len(rows) - len(good)} of {len(rows)}")
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys([*_KNOWN.names, *(key for row in good for key in row)]):
        values = [row.get(name) for row in good]
        kind = _KNOWN.field(name).type if name in _KNOWN.names else None
        if kind == _WHOLE and any(isinstance(value, float) for value in values):
            kind = _REAL  # arrow would drop the fraction
        try:
            columns[name] = pa.array(values, type=kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            fits = _text if kind == pa.string() else _number
            columns[name] = pa.array([fits(value) for value in values], type=kind if fits is _text else _REAL)
            problems.append(f"metrics.jsonl: {name!r} has values of several types; those that do not fit are left out")
    return pa.table(columns), "; ".join(problems)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    with suppress(OverflowError):  # of a whole number with more than 308 digits
        return float(value) if isinstance(value, int | float) else None
    return None
