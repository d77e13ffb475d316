"""Which step of the undisturbed start the resumed one goes on from: the step with the same weights before it."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.audit.records import Process, StartRecord, Step

Names = tuple[str, ...]
FULL, PART, ROUNDED, INPUTS, NONE = "full", "part", "rounded", "inputs", "none"


@dataclass(frozen=True)
class StepMatch:
    """``offset``: steps that the undisturbed start had done at the state of the first resumed step. ``how``: whether
    all weights are equal, a part of them, all after rounding to ``type``, only the inputs, or nothing (then the offset
    is a guess). ``names``: the weights that differ."""

    offset: int
    how: str
    names: Names = ()
    type: str = ""


def loaded_after(killed: StartRecord, resumed: StartRecord) -> int | None:
    """Return the steps done at the newest checkpoint of which ``resumed`` loaded a file; None if it is unknown."""
    found = [
        checkpoint.after
        for checkpoint in killed.checkpoints
        for path in resumed.loaded
        for file in checkpoint.files
        if file == path or file.startswith(f"{path}/") or path.startswith(f"{file}/")
    ]
    return max(found, default=None)


def find(undisturbed: Process, resumed: Process, loaded: int | None) -> StepMatch:
    """Match the first resumed step. Of several fitting steps, take that of the checkpoint ``loaded``, or else the one
    with most other parts in common, or else the last."""
    first = first_steps(resumed.steps)
    ahead = list(_ahead(undisturbed.steps, pairing(undisturbed.steps, resumed.steps)))

    def best(offsets: Iterable[int], score: Callable[[int], int] = lambda _: 0) -> int:
        return max(offsets, key=lambda place: (score(place), place == loaded, _in_common(ahead[place], first), place))

    def unequal(place: int) -> Names:
        return tuple(
            sorted(
                name
                for optimizer, step in first.items()
                for name, digest in step.weights.items()
                if optimizer not in ahead[place] or ahead[place][optimizer].weights.get(name) != digest
            )
        )

    places = [place for place, steps in enumerate(ahead) if steps.keys() >= first.keys()]
    differing = {place: unequal(place) for place in places}
    if full := [place for place in places if not differing[place]]:
        return StepMatch(best(full), FULL)
    if _is_end(undisturbed, first):
        return StepMatch(len(undisturbed.steps), FULL)
    for type_, rounded in ROUNDINGS.items():
        if fits := [place for place in places if _fits_rounded(ahead[place], first, rounded)]:
            place = best(fits, lambda place: -len(differing[place]))
            return StepMatch(place, ROUNDED, differing[place], type_)
    trained = _trained(undisturbed.steps)
    total = {name for step in first.values() for name in step.weights if name in trained}
    counts = {place: len(total.difference(differing[place])) for place in places}
    if part := [place for place in places if counts[place]]:
        # Weights that are not restored have the values of the first step.
        later = [place for place in part if place] or part
        place = loaded if loaded in later else best(later, lambda place: counts[place])
        return StepMatch(place, PART, differing[place])
    names = differing[places[0]] if places else ()
    same = [place for place in places if ahead[place][resumed.steps[0].optimizer].inputs == resumed.steps[0].inputs]
    if loaded is not None and loaded < len(undisturbed.steps):
        return StepMatch(loaded, INPUTS if loaded in same else NONE, names)
    if same and resumed.steps[0].inputs:
        return StepMatch(best(same), INPUTS, names)
    return StepMatch(0, NONE, names)


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
