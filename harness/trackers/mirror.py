"""What a tool that mirrors the record must offer, and what it is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Line = dict[str, Any]  # a line of the record: split, step, epoch, and finite numbers or None


@dataclass(frozen=True)
class Facts:
    """The run that is mirrored. ``id`` and ``started`` (Unix time, s) stay what they are when it is resumed."""

    name: str
    id: str
    started: float
    folder: Path
    output: Path
    settings: dict[str, Any]  # {dotted key: value}
    text: str  # the configuration as YAML


@dataclass(frozen=True)
class Sample:
    """The first rows of the table of predictions; ``images``: uint8 (rows, 1 or 3, height, width), if they are any."""

    columns: list[str]
    rows: list[list[Any]]
    images: np.ndarray | None

    def title(self, row: int) -> str:
        """What is said of a row beside its image."""
        said = dict(zip(self.columns, self.rows[row], strict=True))
        return ", ".join(f"{name} {said[name]}" for name in ("prediction", "label") if said.get(name) is not None)


class Mirror(Protocol):
    """One tool. All calls come from one thread, which is not the one that trains; an exception ends the mirroring."""

    def start(self, facts: Facts, lines: Iterable[Line]) -> str:
        """Begin, or go on after a kill, so that exactly ``lines``, the record so far, is shown, each line once.

        Returns what the user types to look.
        """

    def log(self, line: Line) -> None: ...

    def show(self, sample: Sample) -> None: ...

    def finish(self, files: list[Path], done: bool) -> None:
        """The last call. ``files`` are worth keeping; ``done`` if training came to its end."""


def scalars(line: Line) -> dict[str, float]:
    """The numbers of a line as {"train/loss": 0.5, ...}; what is not finite is left out."""
    return {
        f"{line['split']}/{name}": value
        for name, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }


class Clock:
    """The time of each line, from the record alone, so that a line that is told again has the same time."""

    def __init__(self, started: float) -> None:
        self._started, self._wall_s = started, 0.0

    def time(self, line: Line) -> float:
        """Unix time in seconds; lines without a time of their own have that of the line before."""
        self._wall_s = line.get("wall_s") or self._wall_s
        return self._started + self._wall_s
