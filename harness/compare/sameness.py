"""Whether two runs are the same bit for bit, and if not, where they part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from harness.compare import history
from harness.compare.history import Histories
from harness.runs.reader import Record

if TYPE_CHECKING:
    from harness.compare.tensors import Checkpoints, Weights

Verdict = Literal["same", "same so far", "different", "unknown"]
"""same: weights, newest checkpoint and record of both, bit for bit · same so far: nothing differs, but not all of it is
there in both · different: they part · unknown: nothing could be compared."""


@dataclass(frozen=True)
class Sameness:
    """``parting``: they part between these steps (None: they do not, or nobody can say where)."""

    verdict: Verdict
    parting: tuple[int, int] | None
    weights: Weights
    checkpoints: Checkpoints
    record: Histories
    world_sizes: tuple[int | None, int | None]


def compare(one: Record, other: Record) -> Sameness:
    from harness.compare import tensors  # torch, which takes seconds

    weights = tensors.weights(one.path, other.path)
    checkpoints = tensors.checkpoints(one.path, other.path)
    record = history.compare(one, other)
    found = [weights.same, checkpoints.same, record.same]
    newest = checkpoints.newest
    whole = record.whole and newest[0] == newest[1] and newest[0] in checkpoints.equal and None not in found
    verdict: Verdict
    if False in found:
        verdict = "different"
    elif whole:
        verdict = "same"
    else:
        verdict = "same so far" if True in found else "unknown"
    worlds = one.world_size, other.world_size
    return Sameness(verdict, _parting(checkpoints, record), weights, checkpoints, record, worlds)


def _parting(checkpoints: Checkpoints, record: Histories) -> tuple[int, int] | None:
    """The steps between which two runs part, as narrow as what they left says."""
    ends = [step for step in (checkpoints.differs, record.first.steps[1] if record.first else None) if step is not None]
    if not ends:
        return None
    high = min(ends)
    starts = [record.low, *(step + 1 for step in checkpoints.equal)]
    return min(max(start for start in starts if start <= high or start == record.low), high), high
