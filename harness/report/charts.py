"""What a figure of a report is, but for the curves: a plotly figure as plain data, and the numbers behind it.

Colors are names such as "@c0", which the page replaces by those of its light or dark palette. Text that comes from
files is escaped: plotly takes some of it for markup. The figures themselves are in the ``charts_…`` modules.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

MAX_BARS = 24
Trace = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """``summary`` says in a sentence what is to be seen; ``min_width`` in CSS pixels, below which it scrolls."""

    key: str
    title: str
    summary: str
    data: list[Trace]
    layout: dict[str, Any]
    header: list[str]
    rows: list[list[str]]
    height: int = 340
    min_width: int = 0
    max_width: int = 0  # 0: as wide as there is room


def plain(text: Any) -> str:
    """Text that plotly shows as it is."""
    return html.escape(str(text), quote=False)


def wrapped(label: str) -> str:
    """A label of several settings, one a line."""
    return "<br>".join(plain(part) for part in label.split(" · "))
