"""Words and numbers side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_WIDE = 48  # characters of a value; longer ones are cut


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of a table, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def short(value: Any) -> str:
    said = "null" if value is None else str(value)
    return said if len(said) <= _WIDE else f"{said[: _WIDE - 1]}…"
