"""The first place where two runs differ, from the list of their differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from harness.runs import layout
from harness.tools.compare.exactness import Difference

_PARTS = {
    "model": "weights", "optimizer": "optimizer state", "amp": "loss scaler", "ema": "moving average",
    "state": "progress", "ranks": "random streams, buffers and sums of the ranks", "seen": "rows of the epoch",
}  # fmt: skip
_NAMED = 4  # entries of a part


class FirstDifference:
    """``step``: the first at which a log line or a checkpoint differs; None if only other files do."""

    def __init__(self, found: Sequence[Difference], checkpoints: Sequence[int]) -> None:
        self._found = found
        self._log = [item for item in found if item.file.startswith(layout.METRICS)]
        self._saved = [item for item in found if item.file.startswith(f"{layout.CHECKPOINTS}/")]
        steps = [item.step for item in (*self._log, *self._saved) if item.step is not None]
        self.step = min(steps, default=None)
        self.equal = [step for step in checkpoints if self.step is None or step < self.step]

    def lines(self) -> Iterator[str]:
        """Sentences: the log, the checkpoints, other files."""
        if self._log:
            yield f"first difference in the log: {self._log[0]}"
        if self._saved:
            step = min(item.step for item in self._saved if item.step is not None)
            yield f"first checkpoint that differs: step {step}"
            yield from _parts([item for item in self._saved if item.step == step])
        if self.equal:
            yield f"equal up to and including the checkpoint of step {self.equal[-1]}"
        others = [item for item in self._found if item not in self._log and item not in self._saved]
        yield from (str(item) for item in others[: _NAMED if self._log or self._saved else None])


def _parts(found: Sequence[Difference]) -> Iterator[str]:
    counts = Counter(_part(item) for item in found)
    for part, count in counts.items():
        mine = [item.what for item in found if _part(item) == part]
        named = ", ".join(
            what.name.removeprefix(f"{part}.")
            + (
                f" (up to {what.by:.2g})"
                if what.by is not None
                else f" ({what.values[0]}, {what.values[1]})"
                if what.values
                else ""
            )
            for what in mine[:_NAMED]
        )
        more = f" and {count - _NAMED} more" if count > _NAMED else ""
        yield f"  {_PARTS.get(part, part)}: {named}{more}"


def _part(item: Difference) -> str:
    return item.what.name.partition(".")[0].partition("[")[0]
