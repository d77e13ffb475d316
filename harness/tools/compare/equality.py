"""Bitwise equality of two runs, and the step at which they diverge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from harness.runs.reader import Record
from harness.trackers.metrics_log import TIMES

if TYPE_CHECKING:
    from harness.tools.compare.saved_state import CheckpointsComparison, WeightsComparison

Verdict = Literal["equal", "equal so far", "different", "unknown"]
"""equal: weights, newest checkpoint and log are bitwise equal · equal so far: nothing differs, but one of the runs is
incomplete · different · unknown: there is nothing to compare."""

EntryKey = tuple[str, int, int]  # split, and the steps of an entry: after the first, up to and including the second


@dataclass(frozen=True)
class EntryDifference:
    """The first log entry that differs. ``steps``: the first and the last step that it covers."""

    split: str
    steps: tuple[int, int]
    fields: dict[str, tuple[Any, Any]]


@dataclass(frozen=True)
class LogComparison:
    """Entries of both logs that cover the same steps, times excluded. ``low``: the last step up to which nothing
    differs. ``loss``: the largest difference of a training loss, and its step. ``same``: None if nothing is common."""

    lines: tuple[int, int]
    last_steps: tuple[int, int]
    compared: int
    equal: int
    same: bool | None
    low: int
    first: EntryDifference | None
    loss: tuple[float, int] | None

    @property
    def whole(self) -> bool:
        """True if every entry of both logs has its counterpart."""
        return self.lines == (self.compared, self.compared)


@dataclass(frozen=True)
class Equality:
    """``divergence``: the runs diverge between these steps; None if they do not, or the files do not show where."""

    verdict: Verdict
    divergence: tuple[int, int] | None
    weights: WeightsComparison
    checkpoints: CheckpointsComparison
    log: LogComparison
    world_sizes: tuple[int | None, int | None]


def compare(one: Record, other: Record, trust: bool = False) -> Equality:
    """Compare weights, checkpoints and logs of two runs."""
    from harness.tools.compare import saved_state  # imports torch, which takes seconds

    weights = saved_state.weights(one.path, other.path)
    checkpoints = saved_state.checkpoints(one.path, other.path, trust)
    log = compare_logs(one, other)
    found = [weights.same, checkpoints.same, log.same]
    newest = checkpoints.newest
    finished = one.state == other.state == "finished"
    complete = (
        finished and log.whole and newest[0] == newest[1] and newest[0] in checkpoints.equal and None not in found
    )
    verdict: Verdict
    if False in found:
        verdict = "different"
    elif complete:
        verdict = "equal"
    else:
        verdict = "equal so far" if True in found else "unknown"
    worlds = one.world_size, other.world_size
    return Equality(verdict, _divergence(checkpoints, log), weights, checkpoints, log, worlds)


def _divergence(checkpoints: CheckpointsComparison, log: LogComparison) -> tuple[int, int] | None:
    """The narrowest range of steps that log and checkpoints show."""
    ends = [step for step in (checkpoints.differs, log.first.steps[1] if log.first else None) if step is not None]
    if not ends:
        return None
    high = min(ends)
    starts = [log.low, *(step + 1 for step in checkpoints.equal)]
    return min(max(start for start in starts if start <= high or start == log.low), high), high


def compare_logs(one: Record, other: Record) -> LogComparison:
    """Compare the entries of two logs that cover the same steps."""
    mine, theirs = dict(_entries(one)), dict(_entries(other))
    first, low, equal, largest = None, 0, 0, None
    common = [key for key in mine if key in theirs]
    for key in common:
        split, after, step = key
        entry, partner = mine[key], theirs[key]
        fields = {k: (entry[k], partner[k]) for k in entry if k in partner and entry[k] != partner[k]}
        if not fields:
            equal += 1
            # A training loss is measured before the update of its step, an evaluation after it.
            low = low if first else max(low, step if split == "train" else step + 1)
        elif first is None:
            first = EntryDifference(split, (min(after + 1, step), step), fields)
        if split == "train" and isinstance(entry.get("loss"), float) and isinstance(partner.get("loss"), float):
            gap = abs(entry["loss"] - partner["loss"])
            largest = (gap, step) if largest is None or gap > largest[0] else largest
    return LogComparison(
        (len(mine), len(theirs)), (_last_step(mine), _last_step(theirs)), len(common), equal,
        (equal == len(common)) if common else None, low, first, largest,
    )  # fmt: skip


def _entries(record: Record) -> Iterator[tuple[EntryKey, dict[str, Any]]]:
    """Log entries by the steps that they cover: losses averaged over different steps cannot be compared."""
    after: dict[str, int] = {}
    for row in record.metrics().to_pylist():
        split, step = row["split"], row["step"]
        if split is None or step is None:
            continue
        since = after.get(split, 0) if split == "train" else step
        after[split] = step
        yield (split, since, step), {key: value for key, value in _without_nulls(row).items() if key not in TIMES}


def _without_nulls(value: Any) -> Any:
    """Drop the keys that are null because only other entries of the table have them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _last_step(entries: dict[EntryKey, dict[str, Any]]) -> int:
    return max((step for _, _, step in entries), default=0)
