"""Whether two runs are the same, in words, with the first difference of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.compare.columns import short
from harness.compare.found import Found
from harness.compare.sameness import Sameness
from harness.compare.settings import with_defaults

VERDICTS = {
    "same": "Bitwise the same: weights, newest checkpoint and record.",
    "same so far": "Bitwise the same as far as both go; what is missing is said below.",
    "different": "Not the same.",
    "unknown": "Whether they are the same cannot be said: they left nothing that can be compared.",
}


def lines(found: Found) -> Iterator[str]:
    if found.pair:
        yield from _sameness(found.pair)
        yield from _other_ranks(found)
        return
    if not found.by_seed:
        yield "Not the same: they have no seed in common."
    for seed, same in found.by_seed.items():
        parting = f" {_parting(same)}" if same.parting else ""
        yield f"seed {seed}: {VERDICTS[same.verdict]}{parting}"


def _sameness(same: Sameness) -> Iterator[str]:
    yield f"{VERDICTS[same.verdict]} {_parting(same) if same.parting else ''}".rstrip()
    yield f"  weights      {_weights(same)}"
    yield f"  checkpoints  {_checkpoints(same)}"
    yield from (f"               {problem}" for problem in same.checkpoints.refused)
    yield from (f"  {'record' if not number else '':<11}  {line}" for number, line in enumerate(_record(same)))


def _other_ranks(found: Found) -> Iterator[str]:
    """Why runs of other numbers of ranks part."""
    one, other = found.one.runs[0], found.other.runs[0]
    ranks = one.world_size, other.world_size
    if found.pair is None or found.pair.verdict != "different" or None in ranks:
        return
    if ranks[0] != ranks[1]:
        yield f"  Over {ranks[0]} and over {ranks[1]} ranks sums are taken in another order: last digits differ anyway."
        shards = {with_defaults(run.config)["data"]["shard"] for run in (one, other)}
        if shards != {"global"}:
            yield "  Batches are of other rows, too; with data.shard=global they are the same at any number of ranks."


def _parting(same: Sameness) -> str:
    assert same.parting
    low, high = same.parting
    if low == high:
        return f"They part at step {low}."
    if not low:
        return "They part in the first step." if high == 1 else f"They part within the first {high} steps."
    return f"They part between step {low} and step {high}."


def _weights(same: Sameness) -> str:
    weights = same.weights
    if weights.same is None:
        return f"not compared: {weights.why}"
    of = f", of step {weights.steps[0]}" if weights.steps[0] is not None else ""
    return f"the same{of}" if weights.first is None else f"{_first(weights.first)}{of}"


def _checkpoints(same: Sameness) -> str:
    found = same.checkpoints
    if not found.steps:
        newest = " and ".join("none" if step is None else f"step {step}" for step in found.newest)
        return f"not compared: none of the same step (the newest: {newest})"
    equal = (
        f"the same at step{'s' if len(found.equal) > 1 else ''} {', '.join(map(str, found.equal))}"
        if found.equal
        else ""
    )
    if found.first is None:
        return equal or "not compared"
    return f"{equal}{'; ' if equal else ''}at step {found.differs} {_first(found.first)}"


def _first(part: Any) -> str:
    if part.values is not None:
        return f"{part.name} differs first: {part.values[0]} and {part.values[1]}"
    return f"{part.name} differs first, " + (f"by up to {part.by:.3g}" if part.by is not None else "in shape")


def _record(same: Sameness) -> Iterator[str]:
    record = same.record
    if not record.compared:
        yield f"not compared: no lines of the same steps ({record.lines[0]} and {record.lines[1]} lines)"
        return
    yield f"{record.equal} of {record.compared} lines of the same steps are the same, times aside"
    alone = [f"{label} has {lines - record.compared} more" for label, lines in zip("AB", record.lines, strict=True)
             if lines > record.compared]  # fmt: skip
    if alone:
        ends = f"A goes to step {record.last_steps[0]}, B to step {record.last_steps[1]}"
        yield f"{', '.join(alone)} ({ends})"
    if record.first:
        start, end = record.first.steps
        about = f"step {end}" if start == end else f"steps {start} to {end}"
        yield f"the first that differs: {record.first.split}, {about}"
        for name, pair in record.first.fields.items():
            yield f"  {name}  {short(pair[0])}  {short(pair[1])}"
        if record.loss and record.loss[0]:
            yield f"the largest difference of the training loss: {record.loss[0]:.3g}, at step {record.loss[1]}"
