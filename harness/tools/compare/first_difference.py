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

    def __init__(self, differences: Sequence[Difference], checkpoints: Sequence[int]) -> None:
        self._log = [item for item in differences if item.file.startswith(layout.METRICS)]
        self._saved = [item for item in differences if item.file.startswith(f"{layout.CHECKPOINTS}/")]
        self._others = [
            item for item in differences if not item.file.startswith((layout.METRICS, f"{layout.CHECKPOINTS}/"))
        ]
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


def _parts(differences: Sequence[Difference]) -> Iterator[str]:
    counts = Counter(_part(item) for item in differences)
    for part, count in counts.items():
        of_part = [item.what for item in differences if _part(item) == part]
        sides = [
            sum(isinstance(each, ValueDifference) and each.values[n] == ABSENT for each in of_part) for n in (1, 0)
        ]
        if part == "model" and any(sides):
            num_in_both = count - sum(sides)
            yield f"  weights: other names: {sides[0]} only in A, {sides[1]} only in B; {num_in_both} in both differ"
            continue
        examples = ", ".join(each.name.removeprefix(f"{part}.") + _amount(each) for each in of_part[:_NAMED])
        more = f" and {count - _NAMED} more" if count > _NAMED else ""
        yield f"  {_PARTS.get(part, part)}: {examples}{more}"


def _amount(difference: StateDifference) -> str:
    if isinstance(difference, ValueDifference):
        return f" ({difference.values[0]}, {difference.values[1]})"
    return "" if difference.by is None else f" (up to {difference.by:.2g})"


def _part(item: Difference) -> str:
    return item.what.name.partition(".")[0].partition("[")[0]
