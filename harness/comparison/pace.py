"""What a run cost: seconds, rows a second, and where the time of training went."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow.compute as pc

from harness.records import Record
from harness.trackers.record import TIMES

SHARES = tuple(name for name in TIMES if name.startswith("time_"))


@dataclass(frozen=True)
class Pace:
    """None where the record does not say. ``rows_per_s``: in training, over all ranks. ``shares``: of the time of
    training, by the names in the record; empty for a run of before there were any."""

    wall_s: float | None
    rows_per_s: float | None
    shares: dict[str, float]


def pace(record: Record) -> Pace:
    """From the training lines: each counts as long as its window took."""
    table = record.metrics()
    rows = table.filter(pc.equal(table["split"], "train")).to_pylist()
    total_s, total_rows, before = 0.0, 0, 0
    spent = dict.fromkeys(SHARES, 0.0)
    told = bool(rows)
    for row in rows:
        samples, speed = row["samples"], row["samples_per_s"]
        if samples is None or not speed or samples < before:
            continue
        window_s = (samples - before) / speed
        total_s, total_rows, before = total_s + window_s, total_rows + samples - before, samples
        told = told and row.get(SHARES[0]) is not None
        for name in SHARES:
            spent[name] += window_s * (row.get(name) or 0.0)
    shares = {name: seconds / total_s for name, seconds in spent.items()} if told and total_s else {}
    return Pace(pc.max(table["wall_s"]).as_py(), total_rows / total_s if total_s else None, shares)
