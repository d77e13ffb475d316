"""What training changes and a resumed start has not got: attributes, and random generators of the script's own."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from harness.audit.differences import by_rank, named
from harness.audit.records import StartRecord, Step
from harness.audit.verdict import IN_CHECKPOINT, Finding

_DRAWN = ("rows", "row-order", "inputs", "random-streams")  # faults that a random generator can cause
_FOLLOWS = ("counter", "learning-rate", "optimizer-state")  # those that a hook may cause, and the harness has not
_GLOBAL = re.compile(r"(\w+)((?:\.\w+)*)\['(\w+)'\]")  # an attribute of a module
_PLACE = re.compile(r" \(([^()]+:\d+)\)$")  # of a local variable, as the recorder names it
_OF_LOADER = re.compile(r"(\w+(?: \d+)?)\.generator")  # or of a sampler
_ROWS = re.compile(r"array of \((\d+),")
_WHOLE = re.compile(r"-?\d+")
_COMPUTED = re.compile(r"array of|(np\.\w+\()?-?(\d|nan|inf)")
_RESTORED = {
    "torch.Generator": ("get_state()", "pass it to {0}.set_state()"),
    "numpy.random.Generator": ("bit_generator.state", "assign it to {0}.bit_generator.state"),
    "numpy.random.RandomState": ("get_state()", "pass it to {0}.set_state()"),
    "random.Random": ("getstate()", "pass it to {0}.setstate()"),
}
"""Kinds of random generators: how to save and to restore one."""


class LostGenerator(NamedTuple):
    """A random generator that is not as it was. ``moves``: training draws from it at each step."""

    name: str
    kind: str
    moves: bool

    @property
    def loader(self) -> str:
        """The loader or sampler that it belongs to; empty for one of the script's own."""
        match = _OF_LOADER.fullmatch(self.name)
        return match[1] if match else ""

    @property
    def place(self) -> str:
        """Where a local variable is first assigned, as file:line; empty for another."""
        match = _PLACE.search(self.name)
        return match[1] if match else ""

    def remedy(self, code: str, of_harness: bool) -> str:
        """Say how to restore it. One that orders the rows of an epoch has drawn all of them at its start."""
        which = f"let gen be the generator of your {self.loader}: " if self.loader else ""
        variable, (save, restore) = "gen" if self.loader else self.name.partition(" ")[0], _RESTORED[self.kind]
        save, restore = f"{which}save {variable}.{save}", restore.format(variable)
        if of_harness:
            return f"{save} in state_dict of a hook (docs/hooks.md); {restore} in its load_state_dict"
        if code in ("rows", "row-order") and not self.moves:
            return (
                f"{save} as it is before the first batch of the epoch; after a resume, {restore} before that epoch's "
                "order is drawn, then skip the batches"
            )
        return f"{save} in each checkpoint; after a resume, {restore} before the first batch"


@dataclass
class _Forgotten:
    attributes: dict[str, str] = field(default_factory=dict)
    """By name, a sentence."""
    counters: dict[str, str] = field(default_factory=dict)
    """By name, what to do about whole numbers that are off by as much at each step, such as an epoch."""
    following: set[str] = field(default_factory=set)
    """Batches, tensors in global variables, what was restored and, with other rows or random numbers, what a step may
    compute from them: they may follow from what differs."""
    generators: list[LostGenerator] = field(default_factory=list)
    """Those that are not as they were."""
    same_rows: set[str] = field(default_factory=set)
    """Variables that show that the resumed start reads the right rows, though the model gets other inputs."""


def explained(
    findings: Sequence[Finding], observed: StartRecord, again: StartRecord, resumed: StartRecord
) -> list[Finding]:
    """Return ``findings``, with a likely reason added to one of them.

    It gets a line for each attribute that training changes and whose value in the resumed start is another than in the
    undisturbed one. ``observed`` and ``again``, both undisturbed, show which attributes are equal in equal starts.
    """
    place = next((place for place, each in enumerate(findings) if each.code in _DRAWN), 0)
    found = _forgotten(observed, again, resumed, any(each.code in _DRAWN for each in findings))
    return [
        _explained(each, found, observed.of_harness) if number == place else each
        for number, each in enumerate(findings)
    ]


def _explained(finding: Finding, lost: _Forgotten, of_harness: bool) -> Finding:
    finding = _as_inputs(finding, lost)
    orders = finding.code == "row-order"
    generators = sorted(lost.generators, key=lambda each: each.moves == orders)  # the likelier first
    own = [each for each in generators if not each.loader]
    following, attributes = lost.following - lost.attributes.keys(), lost.attributes
    if finding.code == "inputs" and generators:  # what else differs may be a sum of losses
        generators, following, attributes = own or generators, following | attributes.keys(), {}
    counters = sorted(attributes.keys() & lost.counters.keys()) if finding.code in ("row-order", "inputs") else []
    lines = [attributes[name] for name in counters]
    lines += [f"{each.name}, a {each.kind}, is not as it was" for each in generators]
    lines += [attributes[name] for name in sorted(attributes.keys() - counters)]
    finding = _with_remedy(finding, generators, own, of_harness)
    if counters:
        first = ", ".join(lost.counters[name] for name in counters[:3])
        finding = replace(finding, remedy=f"{first}; if that does not suffice, {finding.advice}")
    follows = finding.code in _FOLLOWS and of_harness
    if lines and (follows or (finding.code == "other" and finding.steps)):  # it has no steps if the start failed
        finding = replace(finding, code="unsaved-state")
    perhaps = [f"also not as it was, perhaps only as a result: {named(sorted(following))}"] if following else []
    return finding.with_lines(lines).with_lines(perhaps)


def _as_inputs(finding: Finding, lost: _Forgotten) -> Finding:
    """Return another order of rows as other inputs, if variables show that the rows are the right ones."""
    if not (finding.code == "row-order" and lost.same_rows and any(each.moves for each in lost.generators)):
        return finding
    text = f"at step {finding.steps[-1]}, the rows are the right ones, but the model gets other inputs"
    return replace(finding, code="inputs", text=text, evidence=(f"as they should be: {named(sorted(lost.same_rows))}",))


def _with_remedy(
    finding: Finding, generators: Sequence[LostGenerator], own: Sequence[LostGenerator], of_harness: bool
) -> Finding:
    """Return ``finding`` with how to restore ``generators``, of which the script's ``own`` may be lost as well."""
    code = finding.code
    if code == "rows" and own and finding.steps[:1] == (1,):  # the order that a script draws starts again
        how = _remedies(own, "rows", of_harness)
        return replace(finding, remedy=f"{how}; if rows are still repeated or skipped then, {finding.advice}")
    if code in ("row-order", "inputs", "other") or _is_of_own_stream(finding):
        how = _remedies(generators, "row-order" if any(each.moves for each in generators) else code, of_harness)
        if how and of_harness and code == "inputs":
            how = f"draw from numpy.random.default_rng(row_seed(seed, epoch, row)) (docs/add_a_task.md), or {how}"
        place = finding.place or next((each.place for each in generators if each.place), "")
        return replace(finding, remedy=how or finding.remedy, place=place)
    if code != "rows" and code in IN_CHECKPOINT and own:  # lost as well
        return replace(finding, remedy=f"{finding.advice}; {_remedies(own, 'row-order', of_harness)}")
    return finding


def _is_of_own_stream(finding: Finding) -> bool:
    """Return True if it names a random generator that is not a global one."""
    return finding.code == "random-streams" and any("." in name for name in finding.names)


def _remedies(generators: Sequence[LostGenerator], code: str, of_harness: bool) -> str:
    return "; ".join(dict.fromkeys(each.remedy(code, of_harness) for each in generators))


def _forgotten(observed: StartRecord, again: StartRecord, resumed: StartRecord, drawn: bool) -> _Forgotten:
    """``drawn``: rows or random numbers are other ones."""
    found = _Forgotten()
    names: defaultdict[tuple[str, str], set[str]] = defaultdict(set)  # one generator has several: of loader and sampler
    moving: set[str] = set()
    for recorded in _recorded(observed, again, resumed):
        undisturbed, repeated, of_resumed = recorded
        first = undisturbed[0].attributes
        if (count := len(undisturbed)) > 2:
            moving |= {name for name in first if len({step.attributes.get(name) for step in undisturbed}) == count}
        restored: set[str] = set()
        for step, step_again, other in zip(undisturbed[1:], repeated[1:], of_resumed, strict=False):
            for name in step.attributes.keys() & step_again.attributes.keys() & other.attributes.keys() & first.keys():
                value, theirs = step.attributes[name], other.attributes[name]
                if not first[name] != value == step_again.attributes[name]:
                    continue
                is_batch, rows_differ = _is_batch(value, step), step.inputs != other.inputs
                starts_over, is_off = theirs == first[name], _is_off(name, undisturbed[1:], of_resumed)
                if value == theirs:
                    restored.add(name)
                    if rows_differ and name in moving and is_batch:
                        found.same_rows.add(_in_code(name))
                elif value.partition(" at ")[0] in _RESTORED:
                    names[value, theirs].add(name)
                elif _PLACE.search(name) and not value.startswith("count("):  # a local tensor
                    continue
                elif (
                    name in restored
                    or (rows_differ and (is_batch or _is_global_array(name, value)))
                    or (drawn and _COMPUTED.match(value) and not (starts_over or is_off))
                ):
                    found.following.add(name)
                else:
                    why = "no checkpoint restores it" if starts_over else "it is restored wrongly or not at all"
                    found.attributes.setdefault(name, f"{name} is {theirs} instead of {value}: {why}")
                    if is_off:
                        variable = _in_code(name).partition(" ")[0]
                        found.counters.setdefault(name, f"let the resume set {variable} to {value}, not {theirs}")
    generators = {
        min(map(_in_code, each), key=_preference): (state.partition(" at ")[0], not each.isdisjoint(moving))
        for (state, _), each in names.items()
    }
    found.generators = [LostGenerator(name, *facts) for name, facts in sorted(generators.items())]
    return found


def _is_off(name: str, undisturbed: Sequence[Step], resumed: Sequence[Step]) -> bool:
    """Return True for a whole number that is off by as much at each step; not for a length, nor for a sum."""
    steps = zip(undisturbed, resumed, strict=False)
    pairs = [(one.attributes.get(name, ""), other.attributes.get(name, "")) for one, other in steps]
    numbers = [(int(one), int(other)) for one, other in pairs if _WHOLE.fullmatch(one) and _WHOLE.fullmatch(other)]
    return len({one - other for one, other in numbers}) == 1 and not name.endswith("(length)")


def _recorded(*starts: StartRecord) -> Iterator[list[list[Step]]]:
    """Yield, for each rank, the steps of each start that have attributes, if all have some."""
    for processes in by_rank(*starts):
        recorded = [[step for step in each.steps if step.attributes] if each else [] for each in processes]
        if all(recorded):
            yield recorded


def _is_batch(value: str, step: Step) -> bool:
    """Return True for an array of as many rows as the model got, such as labels."""
    match = _ROWS.match(value)
    return match is not None and int(match[1]) > 1 and int(match[1]) in {call.rows for call in step.calls}


def _is_global_array(name: str, value: str) -> bool:
    return value.startswith("array of") and _GLOBAL.fullmatch(name) is not None


def _in_code(name: str) -> str:
    """Return a name as it is written in the script."""
    return _GLOBAL.sub(r"\1\2.\3", name).removeprefix("__main__.")


def _preference(name: str) -> tuple[bool, bool, str]:
    return name.endswith(".generator"), _PLACE.search(name) is None, name
