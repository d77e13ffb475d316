"""Which step of the undisturbed start the resumed one goes on from: the step with the same weights before it."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from harness.audit.records import Process, StartRecord, Step

Names = tuple[str, ...]


class MatchKind(Enum):
    """What is equal before the first resumed step and the step of the undisturbed start that it is matched with."""

    FULL = "all weights"
    PART = "a part of the weights"
    ROUNDED = "all weights, after rounding"
    INPUTS = "the inputs alone"
    NONE = "nothing: the offset is a guess"


@dataclass(frozen=True)
class StepMatch:
    """``offset``: steps that the undisturbed start had done at the state of the first resumed step. ``names``: the
    weights that differ. ``rounded_to``: float16 or bfloat16, if they are equal after that rounding."""

    offset: int
    kind: MatchKind
    names: Names = ()
    rounded_to: str = ""


def loaded_after(killed: StartRecord, resumed: StartRecord) -> int | None:
    """Return the steps done at the newest checkpoint of which ``resumed`` loaded a file; None if it is unknown."""
    return max((after for after, _, _ in _loaded(killed, resumed)), default=None)


def save_and_load_lines(killed: StartRecord, resumed: StartRecord) -> tuple[str, str]:
    """Return the lines of the script that save and load this checkpoint, as file:line; empty if they are unknown."""
    for _, file, path in sorted(_loaded(killed, resumed), reverse=True):
        saves = next((each.saves_at[file] for each in killed.processes if each.saves_at.get(file)), "")
        loads = next((each.loads_at[path] for each in resumed.processes if each.loads_at.get(path)), "")
        if saves and loads:
            return saves, loads
    return "", ""


def _loaded(killed: StartRecord, resumed: StartRecord) -> Iterator[tuple[int, str, str]]:
    """Yield the steps done at a checkpoint, a file of it, and the path, of the file or a folder, that was loaded."""
    for checkpoint in killed.checkpoints:
        for path in resumed.loaded:
            for file in checkpoint.files:
                if file == path or file.startswith(f"{path}/") or path.startswith(f"{file}/"):
                    yield checkpoint.after, file, path


def find(undisturbed: Process, resumed: Process, loaded: int | None) -> StepMatch:
    """Match the first resumed step. Of several fitting steps, take that of the checkpoint ``loaded``, or else the one
    with most other parts in common, or else the last."""
    search = _Search(undisturbed, resumed, loaded)
    found = search.by_all_weights() or search.by_rounded_weights() or search.by_some_weights()
    return found or search.by_inputs()


class _Search:
    """The rules of ``find``. A place is the number of steps that the undisturbed start had done.

    ``_ahead[place]`` has the next step of each optimizer. ``_differing[place]`` has the names of the weights whose
    values there are not those before the first resumed step; only places with a next step of every optimizer that the
    resumed start uses are in it. Example: {0: ("a", "b"), 1: (), 2: ("b",)} means a full match at place 1.
    """

    def __init__(self, undisturbed: Process, resumed: Process, loaded: int | None) -> None:
        self._undisturbed = undisturbed
        self._resumed = resumed
        self._loaded = loaded
        self._first = first = first_steps(resumed.steps)
        self._ahead = list(_ahead(undisturbed.steps, pairing(undisturbed.steps, resumed.steps)))
        self._differing = {
            place: _unequal(steps, first) for place, steps in enumerate(self._ahead) if steps.keys() >= first.keys()
        }

    def by_all_weights(self) -> StepMatch | None:
        """Match a place where all weights are equal, or the end of the undisturbed start."""
        if full := [place for place, names in self._differing.items() if not names]:
            return StepMatch(self._best(full), MatchKind.FULL)
        return (
            StepMatch(len(self._undisturbed.steps), MatchKind.FULL) if _is_end(self._undisturbed, self._first) else None
        )

    def by_rounded_weights(self) -> StepMatch | None:
        """Match a place whose weights, rounded to half precision, are the resumed ones."""
        for kind, rounded in ROUNDINGS.items():
            if fits := [each for each in self._differing if _fits_rounded(self._ahead[each], self._first, rounded)]:
                place = self._best(fits, lambda place: -len(self._differing[place]))
                return StepMatch(place, MatchKind.ROUNDED, self._differing[place], kind)
        return None

    def by_some_weights(self) -> StepMatch | None:
        """Match the place that was loaded, or else one with most equal weights, of those that training changes."""
        trained = _trained(self._undisturbed.steps)
        total = {name for step in self._first.values() for name in step.weights if name in trained}
        counts = {place: len(total.difference(names)) for place, names in self._differing.items()}
        some = [place for place, count in counts.items() if count]
        later = [place for place in some if place] or some  # weights that are not restored have the first step's values
        if not later:
            return None
        place = self._loaded if self._loaded in later else self._best(later, lambda place: counts[place])
        return StepMatch(place, MatchKind.PART, self._differing[place])

    def by_inputs(self) -> StepMatch:
        """Match the place that was loaded, or else one with equal inputs, or else guess the begin."""
        names = next(iter(self._differing.values()), ())
        first = self._resumed.steps[0]
        same = [place for place in self._differing if self._ahead[place][first.optimizer].inputs == first.inputs]
        if self._loaded is not None and self._loaded < len(self._undisturbed.steps):
            return StepMatch(self._loaded, MatchKind.INPUTS if self._loaded in same else MatchKind.NONE, names)
        if same and first.inputs:
            return StepMatch(self._best(same), MatchKind.INPUTS, names)
        return StepMatch(0, MatchKind.NONE, names)

    def _best(self, places: Iterable[int], score: Callable[[int], int] = lambda _: 0) -> int:
        def rank(place: int) -> tuple[int, bool, int, int]:
            return score(place), place == self._loaded, _in_common(self._ahead[place], self._first), place

        return max(places, key=rank)


def _unequal(ours: Mapping[int, Step], theirs: Mapping[int, Step]) -> Names:
    """Return the names of the weights of ``theirs`` that ``ours`` does not have with the same values."""
    return tuple(sorted(
        name
        for optimizer, step in theirs.items()
        for name, digest in step.weights.items()
        if optimizer not in ours or ours[optimizer].weights.get(name) != digest
    ))  # fmt: skip


def first_steps(steps: Sequence[Step]) -> dict[int, Step]:
    """Return the first step of each optimizer."""
    found: dict[int, Step] = {}
    for step in steps:
        found.setdefault(step.optimizer, step)
    return found


def pairing(undisturbed: Sequence[Step], resumed: Sequence[Step]) -> dict[int, int]:
    """Return {optimizer of the undisturbed start: the same one in the resumed start}. They are numbered in the order of
    their first steps, which is another if a resume begins between two of them; so the names of weights decide."""
    ours, theirs = first_steps(undisturbed), first_steps(resumed)

    def likeness(one: int, other: int) -> float:
        names = ours[one].weights.keys(), theirs[other].weights.keys()
        return len(names[0] & names[1]) / (len(names[0] | names[1]) or 1)

    return {
        one: max(theirs, key=lambda other: (likeness(one, other), one == other))
        for one in ours
        if theirs and max(likeness(one, other) for other in theirs) > 0
    }


def _ahead(steps: Sequence[Step], paired: Mapping[int, int]) -> Iterator[dict[int, Step]]:
    """Yield, for each step, the next step of each optimizer, by the numbers of the resumed start."""
    found: list[dict[int, Step]] = []
    following: dict[int, Step] = {}
    for step in reversed(steps):
        if step.optimizer in paired:
            following = {**following, paired[step.optimizer]: step}
        found.append(following)
    return reversed(found)


def _is_end(undisturbed: Process, first: Mapping[int, Step]) -> bool:
    last = undisturbed.at_end("weights")
    return bool(last) and all(
        last.get(name) == digest for step in first.values() for name, digest in step.weights.items()
    )


def _in_common(ours: Mapping[int, Step], theirs: Mapping[int, Step]) -> int:
    return sum(
        getattr(ours[number], part) == getattr(step, part)
        for number, step in theirs.items()
        for part in ("state", "rates", "scale", "inputs", "outputs")
    )


def _trained(steps: Sequence[Step]) -> set[str]:
    """Return the names of weights that change during training."""
    values: dict[tuple[int, str], set[str]] = defaultdict(set)
    for step in steps:
        for name, digest in step.weights.items():
            values[step.optimizer, name].add(digest)
    return {name for (_, name), digests in values.items() if len(digests) > 1}


def _float16(value: float) -> float:
    try:
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _bfloat16(value: float) -> float:
    """Return the upper half of a float32, rounded to even."""
    try:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0])


ROUNDINGS: dict[str, Callable[[float], float]] = {"float16": _float16, "bfloat16": _bfloat16}


def _fits_rounded(ours: Mapping[int, Step], theirs: Mapping[int, Step], rounded: Callable[[float], float]) -> bool:
    """Return True if all weights that differ are those of the undisturbed step, rounded."""
    changed = False
    for number, step in theirs.items():
        for name, digest in step.weights.items():
            if ours[number].weights.get(name) == digest:
                continue
            before, after = ours[number].samples.get(name), step.samples.get(name)
            if not before or not after or not _equal_rounded(before, after, rounded):
                return False
            changed = changed or before != after
    return changed


def _equal_rounded(before: Sequence[Any], after: Sequence[Any], rounded: Callable[[float], float]) -> bool:
    return len(before) == len(after) and all(
        one == other if isinstance(one, str) or isinstance(other, str) else rounded(one) == other
        for one, other in zip(before, after, strict=True)
    )
