"""Which rows a resumed start trains on, where it should go on with others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from harness.audit.differences import moving, named
from harness.audit.records import Process, Step
from harness.audit.verdict import Finding
from harness.errors import plural

_WINDOW, _ENOUGH = 64, 3  # calls that are compared; equal ones in a row that show a place


@dataclass(frozen=True)
class _PlacedCall:
    """A call of the model: the digest of its inputs, its rows, and the index of its step."""

    into: str
    rows: int
    step: int


def diagnose(
    undisturbed: Process, resumed: Process, offset: int, index: int, streams: Sequence[str], ended: bool
) -> Finding:
    """Say what is wrong with the inputs of the resumed step ``index``, the first one with others than the undisturbed
    step ``offset + index``. ``streams``: random streams that differ there; ``ended``: both starts trained to their
    end."""
    ours, theirs = _calls(undisturbed.steps), _calls(resumed.steps)
    due = next((place for place, call in enumerate(ours) if call.step >= offset + index), len(ours))
    first = next((place for place, call in enumerate(theirs) if call.step >= index), len(theirs))
    first += _equal_calls(undisturbed.steps[offset + index], resumed.steps[index])
    due += _equal_calls(undisturbed.steps[offset + index], resumed.steps[index])
    number, drawn = offset + index + 1, moving(undisturbed, streams)
    surplus = len(resumed.steps) - (len(undisturbed.steps) - offset) if ended else 0
    found = _found(ours, theirs[first : first + _WINDOW], due, surplus)
    before = f"it goes on from the weights before step {offset + 1}" if index == 0 else f"it is at step {number}"
    if found is None or found == due:
        return _unknown(undisturbed, resumed, offset, index, drawn, before)
    place = ours[found].step
    again = tuple(name for name in drawn if _stream(undisturbed, place, name) == _stream(resumed, index, name))
    longer = surplus == offset + index - place  # by just these rows, whatever draws their order
    if again and place == index and not longer:
        text = f"random stream {named(again)} starts from its seed again: {before}, on the rows of step {place + 1}"
        return Finding("random-streams", text, steps=(number,), names=again)
    kept = _kept_up(ours, theirs, found, first)
    if _other_order(undisturbed, place, offset + index, surplus, ended, ours[found + kept - 1].step):
        epochs = _epoch(undisturbed, place)[0] + 1, _epoch(undisturbed, offset + index)[0] + 1
        text = f"{before}, but reads the rows of step {place + 1}: the order of epoch {epochs[0]} in epoch {epochs[1]}"
        return Finding("row-order", text, (f"{plural(kept, 'batch')} in a row show it",), (place + 1, number))
    low, high = sorted((found, due))
    passed, rows = ours[low:high], sum(call.rows for call in ours[low:high])
    steps = passed[0].step + 1, passed[-1].step + 1
    which = f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"
    if len({call.step for call in ours[: high + 1]}) < len(ours[: high + 1]):
        which = f"{plural(len(passed), 'micro-batch')} of {which}"
    what = "trained again" if found < due else "never trained"
    text = f"the rows of {which} ({rows} rows) are {what}: {before}, but reads those of step {place + 1}"
    evidence: tuple[str, ...] = (f"{plural(kept, 'batch')} in a row show it",)
    if again and place == index:
        evidence += (f"random stream {named(again)} is at step {place + 1} again as well",)
    return Finding("rows", text, evidence, tuple(range(steps[0], steps[1] + 1)))


def _calls(steps: Sequence[Step]) -> list[_PlacedCall]:
    return [_PlacedCall(call.into, call.rows, index) for index, step in enumerate(steps) for call in step.calls]


def _asks_equally(one: Step, other: Step) -> bool:
    """Return True if the last batches that loaders gave before two steps have the same indices. Before them, a resumed
    start gets those that it skips."""
    count = min(len(one.asked), len(other.asked))
    return count > 0 and one.asked[-count:] == other.asked[-count:]


def _equal_calls(one: Step, other: Step) -> int:
    """Return how many of the first inputs of two steps are equal."""
    pairs = list(zip(one.inputs, other.inputs, strict=False))
    return next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))


def _found(ours: Sequence[_PlacedCall], theirs: Sequence[_PlacedCall], due: int, surplus: int) -> int | None:
    """Return where ``theirs`` begin in ``ours``. Of several places: the one with the most equal calls in a row, then
    the one that explains a longer or shorter run, then the nearest."""
    if not theirs:
        return None
    places: dict[str, list[int]] = defaultdict(list)
    for place, call in enumerate(ours):
        places[call.into].append(place)
    known = sum(call.into in places for call in theirs)
    runs = {place: _run(ours, theirs, place, places) for place in places[theirs[0].into]}
    best = max(
        runs,
        key=lambda place: (
            runs[place], -abs(ours[min(due, len(ours) - 1)].step - ours[place].step - surplus), -abs(due - place)
        ),
        default=None,
    )  # fmt: skip
    if best is None or runs[best] < min(_ENOUGH, known, len(ours) - best):
        return None
    return best


def _run(ours: Sequence[_PlacedCall], theirs: Sequence[_PlacedCall], place: int, known: dict[str, list[int]]) -> int:
    """Count equal calls from ``place`` on. Inputs that are in no undisturbed step, such as noise or what another
    network made, are passed over."""
    count = 0
    for one, other in zip(ours[place:], theirs, strict=False):
        if one.into == other.into:
            count += 1
        elif other.into in known:
            break
    return count


def _kept_up(ours: Sequence[_PlacedCall], theirs: Sequence[_PlacedCall], found: int, first: int) -> int:
    pairs = list(zip(ours[found:], theirs[first:], strict=False))
    return next((count for count, (one, other) in enumerate(pairs) if one.into != other.into), len(pairs))


def _epoch(process: Process, index: int) -> tuple[int, int]:
    """Return (the epoch from 0, the place in it) of a step."""
    begins = sorted({after for after in process.epochs if after <= index})
    return len(begins) - 1, index - begins[-1] if begins else index


def _other_order(undisturbed: Process, place: int, due: int, surplus: int, ended: bool, last: int) -> bool:
    """Return True if the rows of another epoch are read at their place in the epoch, and the epoch is not trained again
    or left out: that makes a run longer or shorter, or goes on into the next epoch. ``last``: the last step of which
    the rows are read."""
    (epoch, inside), (epoch_due, inside_due) = _epoch(undisturbed, place), _epoch(undisturbed, due)
    if epoch == epoch_due or inside != inside_due:
        return False
    if ended:
        return surplus != due - place
    left = [after for after in undisturbed.epochs if after > place]
    return not left or last < left[0]


def _stream(process: Process, index: int, name: str) -> str | None:
    return process.steps[index].streams.get(name) if index < len(process.steps) else None


def _unknown(
    undisturbed: Process, resumed: Process, offset: int, index: int, drawn: Sequence[str], before: str
) -> Finding:
    """Inputs that the undisturbed start does not have in this order: its batches are permuted, or made of other rows,
    or of rows that are augmented in another way. A digest cannot tell these apart; a random stream that training draws
    from and that differs is the likelier cause."""
    number = offset + index + 1
    begins = [after for after in undisturbed.epochs if after > offset + index]
    end = begins[0] if begins else len(undisturbed.steps)
    of_epoch = {into for step in undisturbed.steps[offset + index : end] for into in step.inputs}
    equal = _asks_equally(undisturbed.steps[offset + index], resumed.steps[index])
    read = [into for step in resumed.steps[index : index + end - offset - index] for into in step.inputs]
    if read and not equal and all(into in of_epoch for into in read):
        text = f"{before} and reads the right batches, but in another order"
        return Finding("row-order", text, steps=(number,))
    if drawn:
        text = f"{before}, but the inputs are other ones, and so is the random stream {named(drawn)}"
        evidence = ("the undisturbed start draws from it: for the order of rows, or for changes of rows at random",)
        return Finding("random-streams", text, evidence, (number,), tuple(drawn))
    if equal:
        text = f"{before}, and its loader reads the rows of that step, but the model gets other inputs"
        evidence = ("the global random streams agree or are not used: a generator of the script's own changes rows",)
        return Finding("inputs", text, evidence, (number,))
    text = f"{before}, but its inputs are those of no undisturbed step"
    evidence = ("the global random streams agree or are not used: a generator, sampler or loader of the script's own",)
    return Finding("row-order", text, evidence, (number,))
