"""What differs between a step of one start and a step of another, and whether two equal starts differ by chance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.audit.records import Process, StartRecord, Step
from harness.audit.verdict import Finding

Names = tuple[str, ...]
SHOWN = 4  # names in a sentence
_PARTS = (
    "weights", "state", "groups", "scale", "buffers", "streams", "inputs", "outputs", "gradients", "skipped", "beside",
)  # fmt: skip
_IN_BOTH = ("buffers", "streams")  # a start may make more of them, and at another time
_WITHOUT_EFFECT = ("initial_lr",)  # keys of parameter groups


def named(names: Sequence[str]) -> str:
    """Join names as "a, b, c, d and 3 more"."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def unequal(one: dict[str, Any], other: dict[str, Any], in_both: bool = False) -> Names:
    """Return the names whose values differ. A name that only one side has counts, too, unless ``in_both``."""
    if one == other:
        return ()
    names = one.keys() & other.keys() if in_both else one.keys() | other.keys()
    return tuple(sorted(name for name in names if one.get(name) != other.get(name)))


@dataclass(frozen=True)
class Noise:
    """What also differs between two undisturbed starts, as (part, name), so that it is no evidence."""

    known: frozenset[tuple[str, str]] = frozenset()

    def without(self, part: str, names: Iterable[str]) -> Names:
        return tuple(name for name in names if (part, name) not in self.known)


def noise_between(undisturbed: Process, again: Process | None) -> Noise:
    """Compare the steps of two undisturbed starts, and what they hold besides."""
    found: set[tuple[str, str]] = set()
    if again is None:
        return Noise()
    for one, other in zip(undisturbed.steps, again.steps, strict=False):
        found |= {(part, name) for part, names in differing(one, other).items() for name in names}
        found |= {("others", name) for name in unequal(one.others or {}, other.others or {})}
    for part in ("weights", "state", "buffers", "others"):
        found |= {(part, name) for name in unequal(undisturbed.at_end(part), again.at_end(part))}
    return Noise(frozenset(found))


def differing(one: Step, other: Step, known: Noise | None = None) -> dict[str, Names]:
    """Return {part of the record: names in it that differ}; a part without names has its own name."""
    found: dict[str, Names] = {}
    for part in _PARTS:
        values = getattr(one, part), getattr(other, part)
        if values[0] == values[1]:
            continue
        if part == "groups":
            names = _unequal_groups(*values)
        elif isinstance(values[0], dict):
            names = unequal(*values, in_both=part in _IN_BOTH)
        else:
            names = (part,)
        if names := known.without(part, names) if known else names:
            found[part] = names
    return found


def _unequal_groups(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> Names:
    if len(one) != len(other):
        return ("the number of groups",)
    return tuple(
        f"{key} of group {number}"
        for number, (ours, theirs) in enumerate(zip(one, other, strict=True))
        for key in unequal(ours, theirs)
        if key not in _WITHOUT_EFFECT
    )


def moving(undisturbed: Process, names: Sequence[str], at: int | None = None) -> Names:
    """Return those of the random streams ``names`` that training draws from.

    With ``at``, the index of a step, these are only those drawn from between the step before and that one, if any are.
    """
    steps = undisturbed.steps
    used = tuple(name for name in names if len({step.streams.get(name) for step in steps}) > 1)
    return used if at is None else drawn_at(undisturbed, used, at) or used


def drawn_at(undisturbed: Process, names: Sequence[str], at: int) -> Names:
    """Return those of the random streams ``names`` that are drawn from between the step before ``at`` and that one."""
    if not 0 < at < len(undisturbed.steps):
        return ()
    before, now = (undisturbed.steps[index].streams for index in (at - 1, at))
    return tuple(name for name in names if before.get(name) != now.get(name))


def by_rank(*starts: StartRecord) -> Iterator[tuple[Process | None, ...]]:
    """Yield the processes of each rank; None for a start without one."""
    keyed = [{(process.rank, process.order): process for process in start.processes} for start in starts]
    for key in sorted(set().union(*keyed)):
        yield tuple(processes.get(key) for processes in keyed)


def not_recorded(*starts: StartRecord) -> list[Finding]:
    """Find a start whose records are not complete."""
    return [Finding("recorder", f"in the start '{start.name}': {start.fault}") for start in starts if start.fault][:1]


def deterministic(undisturbed: StartRecord, again: StartRecord) -> list[Finding]:
    """Compare two starts that should be equal. Return the first difference that reaches the weights, or nothing. A
    start that was killed is compared up to there."""
    if faults := not_recorded(undisturbed, again):
        return faults
    for one, other in by_rank(undisturbed, again):
        if one is None or other is None:
            if again.killed is None:
                rank = next(process.rank for process in (one, other) if process)
                return [_chance(f"only one of {undisturbed.name} and {again.name} has a rank {rank}")]
        elif finding := _first_chance(one, other, again.name, ended=again.killed is None):
            return [finding]
    return []


def _first_chance(one: Process, other: Process, name: str, ended: bool) -> Finding | None:
    steps = list(zip(one.steps, other.steps, strict=False))
    apart = next((index for index, pair in enumerate(steps) if pair[0].weights != pair[1].weights), None)
    if apart is None and ended:
        if len(one.steps) != len(other.steps):
            text = f"one start takes {len(one.steps)} steps and the start '{name}' {len(other.steps)}"
            return _chance(text, "does it stop by the clock?", ranks=(one.rank,))
        ends = one.at_end("weights"), other.at_end("weights")
        if all(ends) and ends[0] != ends[1]:
            apart = len(steps)
    if apart is None:
        return None
    for index, pair in enumerate(steps[:apart]):
        parts = differing(*pair)
        if part := next((part for part in _BY_CHANCE if part in parts), ""):
            return _chance_at(one, index, part, parts)
    if apart < len(steps):
        return _chance_at(one, apart, "weights", differing(*steps[apart]))
    return _chance(f"two equal starts differ after the last step, {len(steps)}", ranks=(one.rank,))


def _chance_at(one: Process, index: int, part: str, parts: dict[str, Names]) -> Finding:
    """Find that a rank of two equal starts differs first in a ``part`` of the step ``index``."""
    what, *evidence = _BY_CHANCE[part]
    streams = moving(one, parts.get("streams", ()), index)
    if streams and part in ("weights", "inputs", "outputs"):
        evidence = [f"random streams that differ: {named(streams)}; seed them at the start of the script"]
    names = streams if part in ("inputs", "outputs") else parts[part]
    place = f"at step {index + 1}"
    if part == "weights":
        place = f"after step {index}" if index else "before the first step"
    text = f"two equal starts differ first {place}: {what}"
    return _chance(text, *evidence, step=index + 1, names=names, ranks=(one.rank,))


_OPERATIONS = "torch.use_deterministic_algorithms(True), and CUBLAS_WORKSPACE_CONFIG=:4096:8 on a GPU"
_BY_CHANCE = {
    "inputs": ("the inputs of the model", "random streams agree: look for the order of a set or of a folder, the clock "
               "and draws in loader processes"),
    "outputs": ("the outputs of the model", "rows, weights and random streams are equal, so it is the operation itself",
                _OPERATIONS),
    "groups": ("the learning rate or another setting of the optimizer", "does it depend on the clock?"),
    "scale": ("the loss scale", _OPERATIONS),
    "gradients": ("the gradients, while outputs agree", f"an operation of the backward pass, the exchange between "
                  f"ranks, or what the script adds to gradients; {_OPERATIONS}"),
    "weights": ("the weights", "make the model after the seed is set; fused or foreach updates may differ, too"),
}  # fmt: skip


def _chance(
    text: str, *evidence: str, step: int | None = None, names: Names = (), ranks: tuple[int, ...] = ()
) -> Finding:
    return Finding("not-deterministic", text, evidence, () if step is None else (step,), names, ranks)
