"""What a run cost: seconds, rows a second, and where the time of training went."""

from __future__ import annotations

from dataclasses import dataclass

from harness.report import history
from harness.runs.reader import Record


@dataclass(frozen=True)
class Pace:
    """None where the record does not say. ``rows_per_s``: in training, over all ranks. ``shares``: of the time of
    training, by the names in the record; of a run of before there were any ``time_data`` and ``time_rest`` alone."""

    wall_s: float | None
    rows_per_s: float | None
    shares: dict[str, float]


def pace(record: Record) -> Pace:
    past = history.read(record, None, "max")
    shares = {f"time_{phase}": share for phase, share in past.shares.items()}
    return Pace(past.wall_s, past.rows_per_s, shares)
