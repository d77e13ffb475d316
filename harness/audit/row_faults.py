"""Which rows a resumed start trains on, where it should go on with others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from harness.audit.differences import Names, moving, named
from harness.audit.records import Process, Step
from harness.audit.verdict import Finding
from harness.errors import plural

_WINDOW, _ENOUGH = 64, 3  # calls that are compared; equal ones in a row that show a place


class _Call(NamedTuple):
    """A call of the model: the digest of its inputs, its rows, and the index of its step."""

    inputs: str
    rows: int
    step: int


@dataclass(frozen=True)
class _Parting:
    """The resumed step ``index`` gets other inputs than the undisturbed step ``due`` in its place.

    drawn: random streams that differ there and that training draws from
    ended: both starts trained to their end
    """

    undisturbed: Process
    resumed: Process
    offset: int
    index: int
    drawn: Names
    ended: bool

    @property
    def due(self) -> int:
        return self.offset + self.index

    @property
    def surplus(self) -> int:
        """Steps by which the resumed start makes the run longer; 0 if that is unknown."""
        return len(self.resumed.steps) - (len(self.undisturbed.steps) - self.offset) if self.ended else 0

    @property
    def steps(self) -> tuple[Step, Step]:
        return self.undisturbed.steps[self.due], self.resumed.steps[self.index]

    @property
    def before(self) -> str:
        """The first words of a finding."""
        goes_on = f"it goes on from the weights before step {self.offset + 1}"
        return f"it is at step {self.due + 1}" if self.index else goes_on


@dataclass(frozen=True)
class _Passage:
    """The resumed calls are those of the undisturbed start from the place ``found`` on, and not from ``due``.

    calls: those of the undisturbed start
    kept: how many are equal in a row
    """

    calls: Sequence[_Call]
    found: int
    due: int
    kept: int

    @property
    def step(self) -> int:
        return self.calls[self.found].step


def diagnose(
    undisturbed: Process, resumed: Process, offset: int, index: int, streams: Sequence[str], ended: bool
) -> Finding:
    """Return what is wrong with the inputs of the resumed step ``index``, the first one with others than the
    undisturbed step ``offset + index``. ``streams``: random streams that differ there; ``ended``: both starts trained
    to their end."""
    parting = _Parting(undisturbed, resumed, offset, index, moving(undisturbed, streams), ended)
    if passage := _passage(parting):
        known = _of_stream(parting, passage) or _of_other_epoch(parting, passage)
        return known or _of_rows(parting, passage)
    return _of_order(parting) or _of_unknown_stream(parting) or _of_inputs(parting)


def _passage(parting: _Parting) -> _Passage | None:
    """Find the rows of the resumed step in the undisturbed start; None if they are nowhere else."""
    calls, theirs = _calls(parting.undisturbed), _calls(parting.resumed)
    due, first = (
        next((place for place, call in enumerate(each) if call.step >= step), len(each))
        for each, step in ((calls, parting.due), (theirs, parting.index))
    )
    equal = _equal_in_a_row(*(step.inputs for step in parting.steps))
    due, theirs = due + equal, theirs[first + equal :]
    found = _find(calls, theirs[:_WINDOW], due, parting.surplus)
    if found is None or found == due:
        return None
    kept = _equal_in_a_row((call.inputs for call in calls[found:]), (call.inputs for call in theirs))
    return _Passage(calls, found, due, kept)


def _calls(process: Process) -> list[_Call]:
    return [_Call(call.into, call.rows, index) for index, step in enumerate(process.steps) for call in step.calls]


def _equal_in_a_row(one: Iterable[Any], other: Iterable[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _find(ours: Sequence[_Call], theirs: Sequence[_Call], due: int, surplus: int) -> int | None:
    """Return where ``theirs`` begin in ``ours``. Of several places: the one with the most equal calls in a row, then
    the one that explains a longer or shorter run, then the nearest."""
    if not theirs:
        return None
    places: dict[str, list[int]] = defaultdict(list)
    for place, call in enumerate(ours):
        places[call.inputs].append(place)
    lengths = {place: _length(ours[place:], theirs, places) for place in places[theirs[0].inputs]}

    def rank(place: int) -> tuple[int, int, int]:
        extra = ours[min(due, len(ours) - 1)].step - ours[place].step
        return lengths[place], -abs(extra - surplus), -abs(due - place)

    best = max(lengths, key=rank, default=None)
    known = sum(call.inputs in places for call in theirs)
    return None if best is None or lengths[best] < min(_ENOUGH, known, len(ours) - best) else best


def _length(ours: Sequence[_Call], theirs: Sequence[_Call], known: dict[str, list[int]]) -> int:
    """Count equal calls. Inputs that are in no undisturbed step, such as noise or what another network made, are passed
    over."""
    pairs = takewhile(
        lambda pair: pair[0].inputs == pair[1].inputs or pair[1].inputs not in known, zip(ours, theirs, strict=False)
    )
    return sum(one.inputs == other.inputs for one, other in pairs)


# Rules for rows of another step


def _of_stream(parting: _Parting, passage: _Passage) -> Finding | None:
    """A random stream that orders the rows starts from its seed, in a run that does not become longer by that."""
    again = _again(parting, passage)
    if not again or passage.step != parting.index or parting.surplus == parting.due - passage.step:
        return None
    text = f"random stream {named(again)} starts from its seed again: {parting.before}, on the rows of step "
    return Finding("random-streams", f"{text}{passage.step + 1}", steps=(parting.due + 1,), names=again)


def _again(parting: _Parting, passage: _Passage) -> Names:
    """Return the streams that are as they were at the step whose rows are read."""
    ours, theirs = parting.undisturbed.steps[passage.step].streams, parting.steps[1].streams
    return tuple(name for name in parting.drawn if ours.get(name) == theirs.get(name))


def _of_other_epoch(parting: _Parting, passage: _Passage) -> Finding | None:
    """The rows of another epoch are read at their place in the epoch, and the epoch is not trained again or left out:
    that makes a run longer or shorter, or goes on into the next epoch."""
    begins, step = parting.undisturbed.epochs, passage.step
    (epoch, inside), (epoch_due, inside_due) = _epoch(begins, step), _epoch(begins, parting.due)
    if epoch == epoch_due or inside != inside_due:
        return None
    last = passage.calls[passage.found + passage.kept - 1].step
    if parting.surplus == parting.due - step if parting.ended else any(step < after <= last for after in begins):
        return None
    text = f"{parting.before}, but reads the rows of step {step + 1}: the order of epoch {epoch + 1} in epoch "
    return Finding("row-order", f"{text}{epoch_due + 1}", _evidence(passage), (step + 1, parting.due + 1))


def _epoch(begins: Sequence[int], step: int) -> tuple[int, int]:
    """Return (the epoch from 0, the place in it) of a step."""
    starts = sorted({after for after in begins if after <= step})
    return len(starts) - 1, step - starts[-1] if starts else step


def _evidence(passage: _Passage) -> tuple[str, ...]:
    return (f"{plural(passage.kept, 'batch')} in a row show it",)


def _of_rows(parting: _Parting, passage: _Passage) -> Finding:
    """Rows are repeated or skipped."""
    low, high = sorted((passage.found, passage.due))
    passed = passage.calls[low:high]
    first, last = passed[0].step + 1, passed[-1].step + 1
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    if len({call.step for call in passage.calls[: high + 1]}) < len(passage.calls[: high + 1]):
        which = f"{plural(len(passed), 'micro-batch')} of {which}"
    what, sign = ("trained again", 1) if passage.found < passage.due else ("never trained", -1)
    text = f"the rows of {which} ({sum(call.rows for call in passed)} rows) are {what}: {parting.before}, but reads "
    evidence = _evidence(passage)
    if (again := _again(parting, passage)) and passage.step == parting.index:
        evidence += (f"random stream {named(again)} is at step {passage.step + 1} again as well",)
    steps = tuple(range(first, last + 1))
    return Finding("rows", f"{text}those of step {passage.step + 1}", evidence, steps, surplus=sign * len(steps))


# Rules for inputs that the undisturbed start does not have in this order: its batches are permuted, or made of other
# rows, or of rows that are augmented in another way. A digest cannot tell these apart; a random stream that training
# draws from and that differs is the likelier cause.


def _of_order(parting: _Parting) -> Finding | None:
    """The batches of this epoch are permuted."""
    due = parting.due
    steps = parting.undisturbed.steps[due : min((a for a in parting.undisturbed.epochs if a > due), default=None)]
    of_epoch = {inputs for step in steps for inputs in step.inputs}
    read = [inputs for step in parting.resumed.steps[parting.index :][: len(steps)] for inputs in step.inputs]
    if not read or _asks_equally(*parting.steps) or not of_epoch.issuperset(read):
        return None
    return Finding("row-order", f"{parting.before} and reads the right batches, but in another order", steps=(due + 1,))


def _asks_equally(one: Step, other: Step) -> bool:
    """Return True if the last batches that loaders gave before two steps have the same indices. Before them, a resumed
    start gets those that it skips."""
    count = min(len(one.asked), len(other.asked))
    return count > 0 and one.asked[-count:] == other.asked[-count:]


def _of_unknown_stream(parting: _Parting) -> Finding | None:
    if not parting.drawn:
        return None
    text = f"{parting.before}, but the inputs are other ones, and so is the random stream {named(parting.drawn)}"
    evidence = ("the undisturbed start draws from it: for the order of rows, or for changes of rows at random",)
    return Finding("random-streams", text, evidence, (parting.due + 1,), parting.drawn)


def _of_inputs(parting: _Parting) -> Finding:
    """A generator of the script's own changes rows or orders them."""
    agree = "the global random streams agree or are not used: a generator"
    if _asks_equally(*parting.steps):
        text = f"{parting.before}, and its loader reads the rows of that step, but the model gets other inputs"
        return Finding("inputs", text, (f"{agree} of the script's own changes rows",), (parting.due + 1,))
    text = f"{parting.before}, but its inputs are those of no undisturbed step"
    return Finding("row-order", text, (f"{agree}, sampler or loader of the script's own",), (parting.due + 1,))
