"""The protocol of a tracker, and what a tracker receives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Entry = dict[str, Any]  # one line of metrics.jsonl: split, step, epoch, and finite numbers or None


@dataclass(frozen=True)
class RunInfo:
    """The run that is tracked. ``id`` and ``started`` (Unix time in seconds) do not change when the run resumes."""

    name: str
    id: str
    started: float
    folder: Path
    output: Path
    settings: dict[str, Any]  # {dotted key: value}
    config_yaml: str


@dataclass(frozen=True)
class Sample:
    """The first rows of predictions.csv. ``images``: uint8 (rows, 1 or 3, height, width), or None."""

    columns: list[str]
    rows: list[list[Any]]
    images: np.ndarray | None

    def title(self, row: int) -> str:
        """A caption for the image of a row, such as "prediction cat, label dog"."""
        values = dict(zip(self.columns, self.rows[row], strict=True))
        return ", ".join(f"{name} {values[name]}" for name in ("prediction", "label") if values.get(name) is not None)


class Tracker(Protocol):
    """One tool. All calls come from one thread, not the training thread. An exception turns the tracker off."""

    def start(self, info: RunInfo, entries: Iterable[Entry]) -> str:
        """Start or resume tracking, so that the tool shows exactly ``entries``, the log so far, each entry once.

        Returns the command or address at which the user finds the run.
        """

    def log(self, entry: Entry) -> None: ...

    def show(self, sample: Sample) -> None: ...

    def finish(self, files: list[Path], done: bool) -> None:
        """Close the tracker: the last call. ``files``: artifacts to keep. ``done``: training ran to its end."""


def scalars(entry: Entry) -> dict[str, float]:
    """The finite numbers of an entry as {"train/loss": 0.5, ...}."""
    return {
        f"{entry['split']}/{name}": value
        for name, value in entry.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }


class EntryTimes:
    """Timestamps from the log alone, so that an entry has the same time whenever it is replayed."""

    def __init__(self, started: float) -> None:
        self._started, self._wall_s = started, 0.0

    def time(self, entry: Entry) -> float:
        """Unix time in seconds; an entry without ``wall_s`` has the time of the entry before."""
        self._wall_s = entry.get("wall_s") or self._wall_s
        return self._started + self._wall_s
