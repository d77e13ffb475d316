"""Where two records part: the first line that differs, times aside. A record is ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.runs.reader import Record
from harness.trackers.metrics_log import TIMES

Key = tuple[str, int, int]  # split, the steps it speaks of: after the first, up to and with the second
Line = dict[str, Any]


@dataclass(frozen=True)
class Parting:
    """The first line that differs. ``steps``: the first and the last that it speaks of."""

    split: str
    steps: tuple[int, int]
    fields: dict[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Histories:
    """Lines that speak of the same steps, compared. ``low``: the last step up to which nothing differs.
    ``loss``: the largest difference of a training loss, and its step. ``same`` is None without a line in common."""

    lines: tuple[int, int]
    last_steps: tuple[int, int]
    compared: int
    equal: int
    same: bool | None
    low: int
    first: Parting | None
    loss: tuple[float, int] | None

    @property
    def whole(self) -> bool:
        """Whether each line of either has its partner."""
        return self.lines == (self.compared, self.compared)


def compare(one: Record, other: Record) -> Histories:
    mine, theirs = dict(_lines(one)), dict(_lines(other))
    first, low, equal, largest = None, 0, 0, None
    common = [key for key in mine if key in theirs]
    for key in common:
        split, after, step = key
        line, partner = mine[key], theirs[key]
        fields = {name: (line[name], partner[name]) for name in line if name in partner and line[name] != partner[name]}
        if not fields:
            equal += 1
            # A loss is that before the step's update, an evaluation comes after it.
            low = low if first else max(low, step if split == "train" else step + 1)
        elif first is None:
            first = Parting(split, (min(after + 1, step), step), fields)
        if split == "train" and isinstance(line.get("loss"), float) and isinstance(partner.get("loss"), float):
            gap = abs(line["loss"] - partner["loss"])
            largest = (gap, step) if largest is None or gap > largest[0] else largest
    return Histories(
        (len(mine), len(theirs)),
        (_last(mine), _last(theirs)),
        len(common),
        equal,
        (equal == len(common)) if common else None,
        low,
        first,
        largest,
    )


def _lines(record: Record) -> Iterator[tuple[Key, Line]]:
    """The lines of a record, by what they speak of: losses over other windows are other numbers."""
    after: dict[str, int] = {}
    for row in record.metrics().to_pylist():
        split, step = row["split"], row["step"]
        if split is None or step is None:
            continue
        since = after.get(split, 0) if split == "train" else step
        after[split] = step
        yield (split, since, step), {key: value for key, value in _said(row).items() if key not in TIMES}


def _said(value: Any) -> Any:
    """Without the keys that only other lines of a table have."""
    if isinstance(value, dict):
        return {key: _said(item) for key, item in value.items() if item is not None}
    return value


def _last(lines: dict[Key, Line]) -> int:
    return max((step for _, _, step in lines), default=0)
