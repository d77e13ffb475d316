"""Reads ``metrics.jsonl`` into a table, even if lines are damaged or the last one is incomplete."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json

from harness.errors import require_regular_file
from harness.runs.files import parse_json, read_bytes

_REAL, _WHOLE = pa.float64(), pa.int64()
_KNOWN = pa.schema(
    {"split": pa.string(), "step": _WHOLE, "epoch": _WHOLE, "samples": _WHOLE, "skipped": _WHOLE, "wall_s": _REAL,
     "loss": _REAL, "lr": _REAL, "loss_scale": _REAL, "samples_per_s": _REAL, "data_wait": _REAL}
)  # fmt: skip
_TAIL_BYTES = 1 << 16  # enough for the last line
_MAX_DEPTH = 64  # of nesting
_PLAIN = re.compile(rb"(?:\s*\{[^\n]*\n)*\s*")  # each line is an object
_HALF = "metrics.jsonl ends mid-line: the run was killed during a write, or is still writing"


def read_metrics(path: Path) -> tuple[pa.Table, str]:
    """The file as a table, one row per line, and what is wrong with it. Keys that a line does not have are null; the
    columns of training lines always exist."""
    try:
        text = read_bytes(path)
    except FileNotFoundError:
        return _KNOWN.empty_table(), ""
    except OSError as error:
        return _KNOWN.empty_table(), f"metrics.jsonl cannot be read: {error.strerror}"
    return _parsed(text)


def incomplete(path: Path) -> str:
    """The problem of a file that ends in mid-line; empty for any other."""
    try:
        require_regular_file(path)
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            last = file.read().rpartition(b"\n")[2]
    except OSError:
        return ""
    return _HALF if last and not isinstance(_line(last), dict) else ""


def _line(text: bytes) -> Any:
    """The value of a line; None if it is damaged, or cannot be a value of arrow."""
    try:
        value = parse_json(text)
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except ValueError:
        return None
    return None if _deep(text) else value


def _deep(text: bytes) -> bool:
    """True if ``text`` may be nested more deeply than arrow's parser can take."""
    if text.count(b"{") + text.count(b"[") <= _MAX_DEPTH:
        return False
    return max(itertools.accumulate((byte in b"{[") - (byte in b"}]") for byte in text)) > _MAX_DEPTH


def _for_arrow(text: bytes) -> bool:
    """False for text that arrow's parser may crash on: it needs an object per line, UTF-8 and little nesting."""
    return bool(_PLAIN.fullmatch(text)) and b"\\ud" not in text.lower() and not any(map(_deep, text.split(b"\n")))


def _parsed(text: bytes) -> tuple[pa.Table, str]:
    """The lines of ``text`` as a table, and the problems in it."""
    end, problem = text.rfind(b"\n") + 1, ""
    if end < len(text):
        if isinstance(_line(text[end:]), dict):
            text += b"\n"
        else:
            text, problem = text[:end], _HALF
    if not text or text.isspace():
        return _KNOWN.empty_table(), problem
    if not _for_arrow(text):
        return _line_by_line(text.split(b"\n"), problem)
    reading = pyarrow.json.ReadOptions(use_threads=False, block_size=max(len(text), 1 << 20))
    try:
        parsing = pyarrow.json.ParseOptions(explicit_schema=_KNOWN)
        return pyarrow.json.read_json(pa.BufferReader(text), reading, parsing), problem
    except pa.ArrowInvalid:
        return _line_by_line(text.split(b"\n"), problem)


def _line_by_line(lines: Sequence[bytes], problem: str) -> tuple[pa.Table, str]:
    """As ``_parsed``, for a file that arrow refuses: leaves out damaged lines and values."""
    rows = [_line(line) for line in lines if line.strip()]
    good = [row for row in rows if isinstance(row, dict)]
    problems = [problem] if problem else []
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
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            expected, kind = (str, kind) if kind == pa.string() else (int | float, _REAL)
            columns[name] = pa.array([value if isinstance(value, expected) else None for value in values], type=kind)
            problems.append(f"metrics.jsonl: {name!r} has values of several types; those that do not fit are left out")
    return pa.table(columns), "; ".join(problems)
