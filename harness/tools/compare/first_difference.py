"""The first of the differences between two runs, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from harness.runs import layout
from harness.tools.compare.exactness import ABSENT, Difference, StateDifference, ValueDifference

_PARTS = {
    "model": "weights", "optimizer": "optimizer state", "amp": "loss scaler", "ema": "moving average",
    "state": "progress", "ranks": "random streams, buffers and sums of the ranks", "seen": "rows of the epoch",
}  # fmt: skip
_NAMED = 4  # entries of a part


class FirstDifference:
    """``step``: the first at which a log line or a checkpoint differs; None if only other files do."""

    def __init__(self, found: Sequence[Difference], checkpoints: Sequence[int]) -> None:
        self._log = [item for item in found if item.file.startswith(layout.METRICS)]
        self._saved = [item for item in found if item.file.startswith(f"{layout.CHECKPOINTS}/")]
        self._others = [item for item in found if not item.file.startswith((layout.METRICS, f"{layout.CHECKPOINTS}/"))]
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
        yield from (str(item) for item in self._others[: _NAMED if self._log or self._saved else None])


def _parts(found: Sequence[Difference]) -> Iterator[str]:
    counts = Counter(_part(item) for item in found)
    for part, count in counts.items():
        mine = [item.what for item in found if _part(item) == part]
        sides = [sum(isinstance(what, ValueDifference) and what.values[n] == ABSENT for what in mine) for n in (1, 0)]
        if part == "model" and any(sides):
            both = count - sum(sides)
            yield f"  weights: other names: {sides[0]} only in A, {sides[1]} only in B; {both} in both differ"
            continue
        named = ", ".join(what.name.removeprefix(f"{part}.") + _amount(what) for what in mine[:_NAMED])
        more = f" and {count - _NAMED} more" if count > _NAMED else ""
        yield f"  {_PARTS.get(part, part)}: {named}{more}"


def _amount(what: StateDifference) -> str:
    if isinstance(what, ValueDifference):
        return f" ({what.values[0]}, {what.values[1]})"
    return "" if what.by is None else f" (up to {what.by:.2g})"


def _part(item: Difference) -> str:
    return item.what.name.partition(".")[0].partition("[")[0]
