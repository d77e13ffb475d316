"""Numbers, durations, paths and tables as text, for the page and for the terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

STATES = {
    "finished": "✓ finished",
    "running": "▶ running",
    "stopped": "■ stopped",
    "pruned": "✂ pruned",
    "failed": "✕ failed",
    "unfinished": "… unfinished",
    "waiting": "○ waiting",
    "unreadable": "? unreadable",
}
NOTHING = "–"
BEST_DIGITS = 5  # of the deciding metric
_METRICS = {"top1": "accuracy (top-1)", "top5": "accuracy (top-5)"}
_SHORT_KEYS = {
    "launch.nproc": "ranks",
    "batch.global": "batch",
    "batch.per_rank": "batch per rank",
    "optimizer.lr": "lr",
    "optimizer.name": "optimizer",
    "optimizer.weight_decay": "weight decay",
    "model.name": "model",
    "precision.opt_level": "opt level",
    "parallel.strategy": "strategy",
    "schedule.name": "schedule",
    "task.name": "task",
    "train.epochs": "epochs",
}


def number(value: float | None, digits: int = 4) -> str:
    """Return ``value`` with this many significant digits."""
    if value is None or value != value:
        return NOTHING
    text = f"{value:,.{digits}g}" if abs(float(f"{value:.{digits}g}")) < 10**digits else f"{value:,.0f}"
    return text.replace("e-0", "e-").replace("e+0", "e")


def best(value: float | None) -> str:
    """Return a value of the deciding metric."""
    return number(value, BEST_DIGITS)


def signed(value: float | None, digits: int = 6) -> str:
    """Return a difference, with its sign; empty if unknown."""
    return "" if value is None else f"{value:+.{digits}g}"


def table(rows: Sequence[Sequence[str]], indent: str = "", right: Collection[int] = (), width: int = 0) -> list[str]:
    """Return a line per row, each column as wide as its widest cell. ``right``: the columns that are aligned to the
    right; ``width``: the length to which lines are cut, 0 for none."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [
        [
            cell.rjust(size) if index in right else cell.ljust(size)
            for index, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return [(indent + "  ".join(cells)).rstrip()[: width or None] for cells in aligned]


def short(value: Any, most: int = 48) -> str:
    """Return a value of a configuration, of which at most ``most`` characters are left, without the middle."""
    text = "null" if value is None else str(value)  # unrounded: two that differ look different
    half = most // 2
    return text if len(text) <= most else f"{text[: most - half - 1]}…{text[-half:]}"


def count(value: float | None) -> str:
    return NOTHING if value is None or value != value else f"{value:,.0f}"


def percent(value: float | None) -> str:
    return NOTHING if value is None or value != value else f"{100 * value:.1f} %"


def duration(seconds: float | None) -> str:
    """ "8.4 s", "12 min 30 s", "3 h 05 min"."""
    if seconds is None or seconds != seconds:
        return NOTHING
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes} min {remainder:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def ranks(numbers: str) -> str:
    """ "1 rank", "1, then 2 ranks"."""
    return f"{numbers} rank{'' if numbers.split()[-1] == '1' else 's'}"


def metric(name: str | None) -> str:
    """Return a metric's name in a sentence."""
    return _METRICS.get(name or "", (name or "metric").replace("_", " "))


def key(name: str) -> str:
    """Return a short name of a setting."""
    return _SHORT_KEYS.get(name, name)


def setting(value: Any, digits: int = 6) -> str:
    """Return a value of a configuration, in YAML's spelling, with this many significant digits; a list short."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict):
        return short(value, 24)
    return "null" if value is None else f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def path(file: Path) -> str:
    """Return ``file`` relative to the working folder if it is inside."""
    inside = os.path.relpath(file)
    return str(file) if inside.startswith("..") else inside


def without_working_folder(text: str) -> str:
    """Return ``text`` with paths in the working folder made relative."""
    return re.sub(rf"(?<![\w./~-]){re.escape(os.getcwd())}/", "", text)
