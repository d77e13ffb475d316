"""The fields of ``metrics.jsonl``, and the file as a table, whole or damaged. Torch is not needed.

``FIELDS`` is the one list of what the entries of each ``split`` have, for writers and readers. They may have more:
``lr_group_N``, ``unreadable``, the metrics of an evaluation, what the user's own code logs.
"""

from __future__ import annotations

import itertools
import json
import os
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness.errors import require_regular_file
from harness.runs.files import parse_json, read_bytes

PHASES = {
    "data": "waiting for data", "forward": "forward", "backward": "backward", "reduce": "communication",
    "optimizer": "optimizer", "host": "between steps",
}  # fmt: skip
"""The parts of the training time, as people read them."""
SHARES = tuple(f"time_{phase}" for phase in PHASES)


class Role(Enum):
    """What a field is."""

    NUMBER = "a number worth a chart"
    FAULTS = "a count that is worth a chart unless it is 0"
    ROWS = "a count that is worth a chart unless it is ``rows``"
    PLACE = "a count that says where the entry is, or is known beforehand"
    TIME = "a measurement, which differs between two runs that are otherwise equal"
    CLOCK = "the seconds of the run so far"
    COST = "measurements for harness explain"


_ALL = {"step": Role.PLACE, "epoch": Role.PLACE}
_USE = {**_ALL, "rows_used": Role.ROWS, "rows": Role.PLACE, "bad_rows": Role.FAULTS}
_TIMES = {"cost": Role.COST, "wall_s": Role.CLOCK}
FIELDS = {
    "train": {
        **_ALL, **dict.fromkeys(("loss", "lr", "grad_norm", "loss_scale"), Role.NUMBER), "samples": Role.PLACE,
        **dict.fromkeys(("skipped", "samples_skipped"), Role.FAULTS),
        **dict.fromkeys(("samples_per_s", "memory_mib", "data_wait", *SHARES), Role.TIME), **_TIMES,
    },
    "epoch": {**_USE, "rows_updated": Role.ROWS, "rows_repeated": Role.FAULTS, "steps_skipped": Role.FAULTS},
    "eval": {**_USE, "samples_per_s": Role.TIME, **_TIMES},
}  # fmt: skip


def names(*roles: Role) -> frozenset[str]:
    """Return the names of the fields with these ``roles``."""
    return frozenset(name for fields in FIELDS.values() for name, role in fields.items() if role in roles)


TIMES = names(Role.TIME, Role.CLOCK, Role.COST)
NOT_METRICS = names(*Role) - {"loss"}  # of an evaluation, which has a loss of its own
RESERVED = NOT_METRICS | {"split", "unreadable"}  # a metric cannot have these names
_REAL, _WHOLE = pa.float64(), pa.int64()
_TYPES = {role: _REAL if role in (Role.NUMBER, Role.TIME, Role.CLOCK) else _WHOLE for role in Role}
_KNOWN = pa.schema(
    {"split": pa.string()} | {name: _TYPES[role] for name, role in FIELDS["train"].items() if role is not Role.COST}
)
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
    is_complete = not last or isinstance(_line(last), dict)
    return _table([*lines, last] if is_complete else lines, [] if is_complete else [_HALF])


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
