"""The protocol of a tracker, and what a tracker receives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.runs.metrics_table import Role, names

Entry = dict[str, Any]  # one line of metrics.jsonl: split, step, epoch, and finite numbers or None


@dataclass(frozen=True)
class RunInfo:
    """The run that is tracked. ``id`` and ``started`` (Unix time in seconds) do not change when the run resumes."""

    name: str
    id: str
    started: float
    folder: Path
    output: Path
    settings: dict[str, Any]
    """{dotted key: value}."""
    config_yaml: str
    recipe: dict[str, Any]
    """Those of ``settings`` that change what is trained."""
    metrics: tuple[str, ...]
    """Names of those of an evaluation."""


@dataclass(frozen=True)
class LabelPairs:
    """``counts``: int (labels, predictions), the number of rows of each label with each prediction."""

    names: list[str]
    counts: np.ndarray


@dataclass(frozen=True)
class Sample:
    """Rows of predictions.csv. ``images``: uint8 (rows, 1 or 3, height, width), or None."""

    columns: list[str]
    rows: list[list[Any]]
    images: np.ndarray | None
    name: str = "predictions"
    """``predictions``: some rows of each class; ``wrong``: some whose prediction is not the label."""
    confusion: LabelPairs | None = None
    """With the first rows of a classification: the counts over all rows."""

    def title(self, row: int) -> str:
        """Return a caption for the image of a row, such as "prediction cat, label dog"."""
        values = dict(zip(self.columns, self.rows[row], strict=True))
        return ", ".join(f"{name} {values[name]}" for name in ("prediction", "label") if values.get(name) is not None)


class Tracker(Protocol):
    """A tool that shows runs. All calls come from one thread, not the training thread. An exception turns it off."""

    def start(self, info: RunInfo, entries: Iterable[Entry]) -> str:
        """Start or resume tracking, so that the tool shows exactly ``entries``, the log so far, each entry once.

        Returns the command or address at which the user finds the run.
        """

    def log(self, entry: Entry) -> None: ...

    def show(self, sample: Sample) -> None:
        """Show rows of predictions.csv, at the end of training: called once for each name of a sample."""

    def finish(self, files: list[Path], done: bool) -> None:
        """Close the tracker: the last call. ``files``: artifacts to keep. ``done``: training ran to its end."""


_NO_CHART = names(Role.PLACE, Role.CLOCK)
_ONLY_IF_NOT_ZERO, _ONLY_IF_NOT_ALL = names(Role.FAULTS), names(Role.ROWS)


def scalars(entry: Entry) -> dict[str, float]:
    """Return the finite numbers of an entry that are worth a chart, as {"train/loss": 0.5, ...}."""
    return {
        f"{entry['split']}/{name}": value
        for name, value in entry.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in _NO_CHART
        if (value or name not in _ONLY_IF_NOT_ZERO) and (name not in _ONLY_IF_NOT_ALL or value != entry.get("rows"))
    }


class EntryTimes:
    """Timestamps from the log alone, so that an entry has the same time whenever it is replayed."""

    def __init__(self, started: float) -> None:
        self._started, self._wall_s = started, 0.0

    def time(self, entry: Entry) -> float:
        """Return the Unix time of an entry in seconds. One without ``wall_s`` has the time of the entry before."""
        self._wall_s = entry.get("wall_s") or self._wall_s
        return self._started + self._wall_s
