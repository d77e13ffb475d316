"""Numbers, durations and paths as people read them, the same in every form of a report."""

from __future__ import annotations

import os
from typing import Any

STATES = {
    "finished": "✓ finished",
    "stopped": "■ stopped",
    "pruned": "✂ pruned",
    "failed": "✕ failed",
    "unfinished": "… unfinished",
    "waiting": "○ waiting",
    "unreadable": "? unreadable",
}
NOTHING = "–"
_NAMES = {
    "top1": "accuracy (top-1)",
    "top5": "accuracy (top-5)",
    "mean_class_accuracy": "mean class accuracy",
    "loss": "loss",
}


def number(value: float | None, digits: int = 4) -> str:
    """At so many significant digits."""
    if value is None or value != value:
        return NOTHING
    text = f"{value:,.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"
    return text.replace("e-0", "e-").replace("e+0", "e")


def count(value: float | None) -> str:
    return NOTHING if value is None or value != value else f"{value:,.0f}"


def percent(value: float | None) -> str:
    return NOTHING if value is None or value != value else f"{100 * value:.1f} %"


def times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}×"


def duration(seconds: float | None) -> str:
    """ "8.4 s", "12 min 30 s", "3 h 05 min"."""
    if seconds is None or seconds != seconds:
        return NOTHING
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def plural(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def metric(name: str | None) -> str:
    """A metric's name in a sentence."""
    return _NAMES.get(name or "", (name or "metric").replace("_", " "))


def setting(value: Any) -> str:
    """A value of a configuration, as YAML has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def from_here(text: str) -> str:
    """``text`` with paths in the working folder as one types them there."""
    return text.replace(os.getcwd() + os.sep, "")
