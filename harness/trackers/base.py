"""The protocol of a tracker, and what a tracker receives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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


class Tracker(Protocol):
    """One tool. All calls come from one thread, not the training thread. An exception turns the tracker off."""

    def start(self, info: RunInfo, entries: Iterable[Entry]) -> str:
        """Start or resume tracking, so that the tool shows exactly ``entries``, the log so far, each entry once.

        Returns the command or address at which the user finds the run.
        """

    def log(self, entry: Entry) -> None: ...

    def finish(self, files: list[Path], done: bool) -> None:
        """Close the tracker: the last call. ``files``: artifacts to keep. ``done``: training ran to its end."""


# Of an entry, but nothing to plot: its place in time, or known beforehand.
_NO_CHART = frozenset(["step", "epoch", "samples", "rows", "wall_s"])
_ONLY_IF_NOT_ZERO = frozenset(["bad_rows", "skipped", "samples_skipped", "steps_skipped", "rows_repeated"])
_ONLY_IF_NOT_ALL = frozenset(["rows_used", "rows_updated"])  # of ``rows``


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
        """Unix time in seconds; an entry without ``wall_s`` has the time of the entry before."""
        self._wall_s = entry.get("wall_s") or self._wall_s
        return self._started + self._wall_s
