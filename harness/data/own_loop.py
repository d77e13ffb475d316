"""Finds a loop of the user's own that would never end, since it counts no step."""

from __future__ import annotations

from collections.abc import Sequence

from harness.data.shards import Segment
from harness.errors import TrainingError

ADVANCE = (
    "in your loop, call run.train_data.advance(run.state.segments) after each step, and run.state.next_epoch() after "
    "the last one"
)


class Passes:
    """The last passes of ``groups`` over an epoch."""

    MOST = 2  # passes over an epoch without counting a step, as for statistics

    def __init__(self) -> None:
        self._last: list[tuple[Sequence[Segment], tuple[int, int]]] = []  # from which list, epoch and step

    def start(self, epoch: int, segments: Sequence[Segment]) -> tuple[int, int]:
        """Return the position of a pass. Raises TrainingError if the passes before it started there, too."""
        position = epoch, sum(segment.steps for segment in segments)
        if sum(of is segments and start == position for of, start in self._last) == self.MOST:
            raise TrainingError(
                f"all groups of epoch {epoch + 1} have been used {self.MOST} times, and none was counted: this loop "
                "would never end",
                hint=ADVANCE,
            )
        return position

    def end(self, segments: Sequence[Segment], position: tuple[int, int]) -> None:
        """Note that a pass came to the end of the epoch."""
        self._last[:] = [(segments, position), *self._last][: self.MOST]
