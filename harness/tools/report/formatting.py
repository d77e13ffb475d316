"""Numbers, durations and paths as text, the same in every format of a report."""

from __future__ import annotations

import os
from pathlib import Path
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
BEST_DIGITS = 5  # of the deciding metric
_METRICS = {"top1": "accuracy (top-1)", "top5": "accuracy (top-5)"}
_SHORT_KEYS = {
    "batch.global": "batch",
    "batch.per_rank": "batch per rank",
    "optimizer.lr": "lr",
    "optimizer.name": "optimizer",
    "optimizer.weight_decay": "weight decay",
    "model.name": "model",
    "precision.opt_level": "level",
    "parallel.strategy": "strategy",
    "schedule.name": "schedule",
    "task.name": "task",
    "train.epochs": "epochs",
}


def number(value: float | None, digits: int = 4) -> str:
    """``value`` with this many significant digits."""
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
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def ranks(numbers: str) -> str:
    """ "1 rank", "1, then 2 ranks"."""
    return f"{numbers} rank{'' if numbers.split()[-1] == '1' else 's'}"


def metric(name: str | None) -> str:
    """A metric's name in a sentence."""
    return _METRICS.get(name or "", (name or "metric").replace("_", " "))


def at_least(direction: str, value: float) -> str:
    """ "≥ 0.95", or "≤" where smaller is better."""
    return f"{'≥' if direction == 'max' else '≤'} {number(value)}"


def key(name: str) -> str:
    """A short name of a setting."""
    return _SHORT_KEYS.get(name, name)


def setting(value: Any) -> str:
    """A value of a configuration, in YAML's spelling."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def path(place: Path) -> str:
    """``place`` relative to the working folder if it is inside."""
    inside = os.path.relpath(place)
    return str(place) if inside.startswith("..") else inside


def without_working_folder(text: str) -> str:
    """``text`` with paths in the working folder made relative."""
    return text.replace(os.getcwd() + os.sep, "")
