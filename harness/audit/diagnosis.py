"""Whether a resumed start goes on as the undisturbed one, and if not, which kind of fault it is.

Steps are matched by the weights before them (matching.py). From there on, both starts are read step by step up to the
first difference; what differs there is the fault, and what differs later may follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.audit import endings, matching, row_faults, saved_faults
from harness.audit.differences import (
    Names,
    Noise,
    by_rank,
    deterministic,
    differing,
    drawn_at,
    moving,
    named,
    noise_between,
    not_recorded,
    unequal,
)
from harness.audit.matching import MatchKind, StepMatch
from harness.audit.records import Process, StartRecord, Step
from harness.audit.verdict import IN_CHECKPOINT, Finding, StartSummary

__all__ = ["compare", "deterministic", "failure", "offset", "summaries"]

_HARMLESS = {"beside", "buffers", "scale", "streams"}  # parts that may differ while training stays equal
_NEVER = float("inf")
_WITH_RATE = (
    "save and load optimizer.state_dict(), which holds the learning rate, too; if the schedule is off then, also "
    "scheduler.state_dict()"
)


@dataclass
class _RankResult:
    """``apart``: index of the first resumed step at which training differs. ``certain`` findings have a cause on this
    rank; the others may come from another rank."""

    rank: int
    match: StepMatch
    apart: float = _NEVER
    certain: list[Finding] = field(default_factory=list)
    uncertain: list[Finding] = field(default_factory=list)
    harmless: list[Finding] = field(default_factory=list)
    """Faults that leave training equal at first."""


def compare(undisturbed: StartRecord, again: StartRecord, killed: StartRecord, resumed: StartRecord) -> list[Finding]:
    """Return what is wrong with the resume; nothing if it is exact."""
    if faults := not_recorded(undisturbed, again, killed, resumed):
        return faults
    if not undisturbed.steps:
        return [Finding("no-steps", "the undisturbed start takes no optimizer step")]
    if chance := deterministic(undisturbed, killed):
        text = f"the killed start differs from the undisturbed one before the kill: {chance[0].text}"
        return [replace(chance[0], text=text)]
    loaded = matching.loaded_after(killed, resumed)
    if not resumed.steps:
        return _without_steps(undisturbed, killed, resumed, loaded)
    whole = endings.complete(killed, undisturbed)
    results: list[_RankResult] = []
    found: list[Finding] = []
    for ours, same, theirs in by_rank(undisturbed, again, resumed):
        if ours is not None and theirs is not None:
            ended = not (undisturbed.stopped or resumed.stopped or endings.failed(resumed))
            results.append(_of_rank(ours, noise_between(ours, same), theirs, loaded, bool(whole), ended))
        elif ours is not None and same is not None:
            found.append(Finding("other", f"rank {ours.rank} takes no step after the resume", ranks=(ours.rank,)))
    if not results:
        return found
    offset = results[0].match.offset
    found += _first(results)
    if all(finding.code != "from-scratch" for finding in found):
        apart = min(result.apart for result in results)
        found += _some(endings.length(undisturbed, resumed, offset, sum(finding.surplus for finding in found)))
        known = {name for finding in found if finding.code == "saved-state" for name in finding.names}
        saved = saved_faults.in_checkpoints(undisturbed, again, resumed, offset, apart - 1)
        found += [each for each in saved if not (each.code == "counter" and known.issuperset(each.names))]
    found += _some(endings.exit_code(undisturbed, resumed))
    found = list({finding.code: finding for finding in reversed(found)}.values())[::-1]
    found = found or _some(endings.failure(undisturbed, resumed, offset))
    found = [_located(finding, *matching.save_and_load_lines(killed, resumed)) for finding in found]
    return _some(endings.torn(killed, undisturbed, resumed, found)) or found


def _located(finding: Finding, saves: str, loads: str) -> Finding:
    """Add the lines of the script that save and load the checkpoint, if they are known."""
    if finding.code not in IN_CHECKPOINT or not (saves and loads):
        return finding
    return replace(finding.with_lines([f"{saves} saves the checkpoint"]), place=loads)


def failure(undisturbed: StartRecord, killed: StartRecord, resumed: StartRecord) -> list[Finding]:
    """Return what is wrong with the end of a resume on another number of ranks, whose steps are not comparable."""
    found = endings.failure(undisturbed, resumed, len(killed.steps)) or endings.exit_code(undisturbed, resumed)
    return _some(found)


def offset(undisturbed: StartRecord, killed: StartRecord, resumed: StartRecord) -> int:
    """Return the steps that the undisturbed start had done where the resumed one begins."""
    loaded = matching.loaded_after(killed, resumed)
    if not (undisturbed.steps and resumed.steps):
        return loaded or 0
    return matching.find(undisturbed.processes[0], resumed.processes[0], loaded).offset


def _some(finding: Finding | None) -> list[Finding]:
    return [finding] if finding else []


def _without_steps(
    undisturbed: StartRecord, killed: StartRecord, resumed: StartRecord, loaded: int | None
) -> list[Finding]:
    offset = loaded if loaded is not None else len(killed.steps)
    found = endings.failure(undisturbed, resumed, offset) or endings.exit_code(undisturbed, resumed)
    if found is None and loaded != len(undisturbed.steps):
        found = endings.length(undisturbed, resumed, offset)
    if found is None:
        return []
    return [endings.torn(killed, undisturbed, resumed, [found]) or found]


def _first(results: Sequence[_RankResult]) -> list[Finding]:
    """Return the findings at the first step that differs on any rank, once for all of their ranks."""
    earliest = min(result.apart for result in results)
    chosen = [(result.rank, each) for result in results if result.apart == earliest for each in result.certain]
    for result in results:
        last = result.match.offset + earliest + 1
        chosen += [(result.rank, each) for each in result.harmless if each.steps[0] <= last]
    if not chosen:
        chosen = [(result.rank, each) for result in results if result.apart == earliest for each in result.uncertain]
    merged: dict[str, Finding] = {}
    for rank, finding in chosen:
        known = merged.get(finding.code)
        ranks = (*known.ranks, rank) if known and rank not in known.ranks else known.ranks if known else (rank,)
        merged[finding.code] = replace(known or finding, ranks=ranks)
    everywhere = {result.rank for result in results}
    return [
        finding
        if set(finding.ranks) == everywhere
        else replace(finding, text=f"on rank {', '.join(map(str, finding.ranks))} only, {finding.text}")
        for finding in merged.values()
    ]


# One rank


def _of_rank(
    ours: Process, known: Noise, theirs: Process, loaded: int | None, has_checkpoint: bool, ended: bool
) -> _RankResult:
    match = matching.find(ours, theirs, loaded)
    result = _RankResult(theirs.rank, match)
    if has_checkpoint and _is_scratch(ours, theirs, match):
        text = "the weights before the first resumed step are those before step 1, though a checkpoint was complete"
        loads = f"it loads {theirs.loaded[-1]}" if theirs.loaded else "it loads no checkpoint"
        result.certain.append(Finding("from-scratch", text, (loads,), (1,)))
        if theirs.steps[0].state != ours.steps[0].state:
            names = tuple(theirs.steps[0].weights)
            text = f"all weights are those before step 1, though the optimizer's state is not: {named(names)}"
            result.certain = [Finding("weights", text, (loads,), (1,), names)]
            result.match = StepMatch(loaded or 0, MatchKind.PART, names)
        result.apart = 0
        return result
    if match.kind != MatchKind.FULL:
        result.certain.append(_of_weights(ours, theirs, match))
        result.apart = 0
    for index, (one, other) in enumerate(zip(ours.steps[match.offset :], theirs.steps, strict=False)):
        parts = differing(one, other, known)
        if index == 0 and "gradients" not in parts and _ends_equally(one, other):
            parts = {part: names for part, names in parts.items() if part not in ("inputs", "outputs")}
        harmful = parts.keys() - _HARMLESS
        if match.kind == MatchKind.FULL and not harmful:
            _add_harmless(result, parts, one, other)
            continue
        if match.kind in (MatchKind.FULL, MatchKind.PART, MatchKind.ROUNDED):
            _add_harmful(result, parts, ours, theirs, index, known, ended)
        elif one.state and not other.state:
            result.certain.append(_of_state(parts.get("state", ()), one, other))
        result.apart = index
        break
    else:
        _at_end(result, ours, theirs, known)
    beside = saved_faults.beside_the_model(ours, theirs, match.offset, result.apart, known)
    if beside and not any(finding.code == "buffers" for finding in (*result.certain, *result.harmless)):
        result.harmless.append(beside)
    return result


def _ends_equally(one: Step, other: Step) -> bool:
    """Return True if the last calls before two steps are equal. Before them, the undisturbed start may have calls that
    the step before made at its end, such as those of a closure, and the resumed one a call that is no training."""
    count = min(len(one.calls), len(other.calls))
    return count > 0 and one.calls[-count:] == other.calls[-count:]


def _is_scratch(ours: Process, theirs: Process, match: StepMatch) -> bool:
    if match.kind == MatchKind.FULL:
        return match.offset == 0
    if match.kind in (MatchKind.PART, MatchKind.ROUNDED) or theirs.loaded:
        return False
    return theirs.steps[0].state.keys() == ours.steps[0].state.keys()


def _of_weights(ours: Process, theirs: Process, match: StepMatch) -> Finding:
    number, count = match.offset + 1, len({name for step in theirs.steps for name in step.weights})
    if match.kind == MatchKind.ROUNDED:
        text = f"the weights before step {number} were rounded to {match.rounded_to}: {named(match.names)}"
        return Finding("precision", text, steps=(number,), names=match.names)
    if match.kind == MatchKind.PART:
        text = f"{len(match.names)} of {count} weights are not those before step {number}: {named(match.names)}"
        first = {name: digest for step in reversed(ours.steps) for name, digest in step.weights.items()}
        begun = matching.first_steps(theirs.steps).values()
        initial = all(step.weights.get(name, first[name]) == first.get(name) for step in begun for name in match.names)
        evidence = ("they are those before step 1",) if initial else ()
        return Finding("weights", text, evidence, (number,), match.names)
    text = "the weights before the first resumed step are those before no undisturbed step"
    if match.kind == MatchKind.INPUTS:
        evidence = (f"its rows are those of step {number}",)
    else:
        evidence = (f"it should go on with step {number}",) if match.offset else ()
    return Finding("other", text, evidence, (number,), match.names)


def _add_harmless(result: _RankResult, parts: Mapping[str, Names], one: Step, other: Step) -> None:
    known = {finding.code for finding in result.harmless}
    if "scale" in parts and "loss-scale" not in known:
        result.harmless.append(_of_scale(one, other))
    if "buffers" in parts and "buffers" not in known:
        text = (
            f"at step {one.number}, rows, weights and outputs are equal, but buffers are not: {named(parts['buffers'])}"
        )
        result.harmless.append(Finding("buffers", text, steps=(one.number,), names=parts["buffers"]))
    if "beside" in parts and not known:
        result.harmless.append(_of_saved_state(parts["beside"], one, other))


def _add_harmful(
    result: _RankResult,
    parts: Mapping[str, Names],
    ours: Process,
    theirs: Process,
    index: int,
    known: Noise,
    ended: bool,
) -> None:
    """Add a finding for each part of the step that differs and cannot follow from another one."""
    offset = result.match.offset
    one, other = ours.steps[offset + index], theirs.steps[index]
    states, groups = parts.get("state", ()), parts.get("groups", ())
    if index == 0:  # each optimizer has a first step, and nothing has changed its state before
        for mine, yours in _first_of_each(ours, theirs, offset):
            if mine is not one:
                more = differing(mine, yours, known)
                states += more.get("state", ())
                groups = groups or more.get("groups", ())
                if "groups" in more and "groups" not in parts:
                    one, other = mine, yours
    if states:
        result.certain.append(_of_state(states, ours.steps[offset + index], theirs.steps[index]))
    if groups:
        finding = _of_groups(groups, ours, theirs, one, other)
        if one.state and not other.state and result.certain:  # lost together
            remedy = _WITH_RATE if finding.code == "learning-rate" else finding.remedy
            result.certain[-1] = replace(result.certain[-1].with_lines([finding.text]), remedy=remedy)
        else:
            result.certain.append(finding)
    one, other = ours.steps[offset + index], theirs.steps[index]
    if index == 0 and "beside" in parts:  # later it may follow from what differs
        result.certain.append(_of_saved_state(parts["beside"], one, other))
    if "scale" in parts and not any(finding.code == "loss-scale" for finding in result.harmless):
        result.certain.append(_of_scale(one, other))
    drawn: tuple[str, ...] = parts.get("streams", ())
    if "inputs" in parts:
        finding = row_faults.diagnose(ours, theirs, offset, index, drawn, ended)
        # With other weights, what one network makes for another differs, too.
        if result.match.kind == MatchKind.FULL or finding.code == "rows":
            result.certain.append(finding)
    elif "outputs" in parts and "weights" not in parts and result.match.kind == MatchKind.FULL:
        finding = _of_outputs(ours, theirs, offset, index, parts, known)
        (result.uncertain if finding.code == "other" else result.certain).append(finding)
    if not result.certain and not result.uncertain and not result.harmless:
        what = next(part for part in ("weights", "gradients", "skipped", "state", "outputs") if part in parts)
        text = f"the first difference, at step {one.number}, is in {_PARTS[what]}: {named(parts[what])}"
        late = drawn_at(ours, drawn, offset + index) if what in ("weights", "gradients") else ()
        if late and result.match.kind == MatchKind.FULL:  # drawn after the forward pass
            text += f"; random stream {named(late)} differs, too"
            again = _from_seed(ours, theirs, index, late)
            result.certain.append(Finding("random-streams", text, again, (one.number,), late))
        else:
            result.uncertain.append(Finding("other", text, steps=(one.number,), names=parts[what]))


_PARTS = {
    "weights": "the weights, while all before their update was equal",
    "gradients": "the gradients, while rows, weights and outputs are equal",
    "skipped": "whether the step is skipped",
    "state": "the optimizer's state",
    "outputs": "the outputs",
}


def _first_of_each(ours: Process, theirs: Process, offset: int) -> Iterator[tuple[Step, Step]]:
    paired = matching.pairing(ours.steps, theirs.steps)
    following = matching.first_steps(ours.steps[offset:])
    begun = matching.first_steps(theirs.steps)
    for optimizer, step in following.items():
        if optimizer in paired:
            yield step, begun[paired[optimizer]]


def _of_state(names: Names, one: Step, other: Step) -> Finding:
    number = one.number
    if one.state and not other.state:
        text = f"before step {number}, the optimizer's state is missing: {named(tuple(one.state))}"
        return Finding("optimizer-state", text, ("the optimizer starts without state",), (number,), names)
    text = f"before step {number}, the optimizer's state differs: {named(names)}"
    return Finding("optimizer-state", text, steps=(number,), names=names)


def _of_groups(names: Names, ours: Process, theirs: Process, one: Step, other: Step) -> Finding:
    if len(one.rates) != len(other.rates) or one.rates == other.rates:
        text = f"at step {one.number}, settings of the optimizer's groups differ: {named(names)}"
        return Finding("optimizer-state", text, steps=(one.number,), names=names)
    shown = " instead of ".join(", ".join(map(_number, dict.fromkeys(step.rates))) for step in (other, one))
    text = f"the learning rate of step {one.number} is {shown}"
    due = [step for step in ours.steps if step.optimizer == one.optimizer]
    used = [step for step in theirs.steps[other.number - 1 :] if step.optimizer == other.optimizer]
    place, here = _fitting(due, [step.rates for step in used]), due.index(one)
    if not other.state and (one.state or place is None) and _keep_ratio(due[here:], used, 0 if one.state else 2):
        text += ": the optimizer has lost it"
        remedy = "" if place is None else _WITH_RATE  # it may as well start over
        return Finding("optimizer-state", text, steps=(one.number,), names=names, remedy=remedy)
    if place is not None:
        steps, way = abs(place - here), "behind" if place < here else "ahead"
        how = "starts over" if place == 0 and other.number == 1 else f"is {steps} step{'s' * (steps > 1)} {way}"
        text += f": the schedule {how}, as at step {due[place].number}"
    return Finding("learning-rate", text, steps=(one.number,), names=names)


def _fitting(steps: Sequence[Step], rates: Sequence[Any]) -> int | None:
    """Return where these learning rates are used in a row, if they change there."""
    best, longest = None, 0
    for place in range(len(steps)):
        pairs = list(zip(steps[place:], rates, strict=False))
        run = next((count for count, (step, rate) in enumerate(pairs) if step.rates != rate), len(pairs))
        if run > longest:
            best, longest = place, run
    return best if longest >= min(3, len(rates)) and len(set(rates[:longest])) > 1 else None


def _keep_ratio(due: Sequence[Step], used: Sequence[Step], least: int) -> bool:
    """Return True if, after the first of these steps, learning rates change by the factors by which they should, in
    ``least`` steps or more. Steps with other parameter groups are left out."""
    pairs = [(one.rates, other.rates) for one, other in zip(due[1:], used[1:], strict=False)]
    pairs = [pair for pair in pairs if len(pair[0]) == len(pair[1])]
    pairs = [pair for pair in pairs if len(pair[0]) == len(pairs[0][0])]
    return len(pairs) >= max(least, 1) and all(
        all(isinstance(rate, float | int) for rate in rates)
        and math.isclose(rates[0] * rates[3], rates[1] * rates[2], rel_tol=1e-6, abs_tol=1e-15)
        for pair in pairs
        for rates in zip(*pair, *pairs[0], strict=True)
    )


def _of_saved_state(names: Names, one: Step, other: Step) -> Finding:
    shown = [f"{name} is {other.beside.get(name)} instead of {one.beside.get(name)}" for name in names]
    text = f"before step {one.number}, what a checkpoint holds beside the model differs: {named(shown)}"
    return Finding("saved-state", text, steps=(one.number,), names=names)


def _of_scale(one: Step, other: Step) -> Finding:
    """A scaler has a scale or, if the recorder knows it, also the steps since it last grew."""
    ours, theirs = ([scale[0] if isinstance(scale, list) else scale for scale in step.scale] for step in (one, other))
    if ours == theirs:
        what, ours, theirs = "count of steps since the loss scale grew", list(one.scale), list(other.scale)
    else:
        what = "loss scale"
    shown = " instead of ".join(", ".join(map(_number, values)) or "none" for values in (theirs, ours))
    evidence = () if other.number == 1 else ("the scaler counts steps without overflow, and lost this count",)
    return Finding("loss-scale", f"the {what} at step {one.number} is {shown}", evidence, (one.number,))


def _of_outputs(
    ours: Process, theirs: Process, offset: int, index: int, parts: Mapping[str, Names], known: Noise
) -> Finding:
    """Explain other outputs for equal rows and weights."""
    number = offset + index + 1
    drawn = moving(ours, parts.get("streams", ()), offset + index)
    before = f"rows and weights are equal at step {number}, but outputs differ"
    if drawn:
        text = f"{before}, and so does random stream {named(drawn)}"
        return Finding("random-streams", text, _from_seed(ours, theirs, index, drawn), (number,), drawn)
    if buffers := parts.get("buffers"):
        return Finding("buffers", f"{before}, and so do buffers: {named(buffers)}", steps=(number,), names=buffers)
    if index == 0 and (own := tuple(saved_faults.generators(ours, theirs, offset, known))):
        return Finding("random-streams", f"{before}, and so does {named(own)}", steps=(number,), names=own)
    evidence = ("random streams and buffers agree: look for plain attributes and generators of the script's own",)
    return Finding("other", before, evidence, (number,))


def _from_seed(ours: Process, theirs: Process, index: int, streams: Names) -> tuple[str, ...]:
    again = all(ours.steps[index].streams.get(name) == theirs.steps[index].streams.get(name) for name in streams)
    return ("it starts from its seed again",) if again else ()


def _at_end(result: _RankResult, ours: Process, theirs: Process, known: Noise) -> None:
    """Compare what is left at the exit of two starts that trained equally."""
    if len(theirs.steps) != len(ours.steps) - result.match.offset or not (ours.end and theirs.end):
        return
    count = len(ours.steps)
    for part, code in (("weights", "other"), ("state", "other"), ("buffers", "buffers")):
        names = known.without(part, unequal(ours.at_end(part), theirs.at_end(part), in_both=True))
        if names and not any(finding.code == code for finding in (*result.uncertain, *result.harmless)):
            text = f"after the last step, {count}, {part} differ: {named(names)}"
            target = result.harmless if code == "buffers" else result.uncertain
            target.append(Finding(code, text, steps=(count,), names=names))


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float | int) else str(value)


def summaries(starts: Sequence[StartRecord]) -> list[StartSummary]:
    """Return the starts in the numbers of the page."""
    by_name = {start.name: start for start in starts}
    return [_summary(start, by_name) for start in starts]


def _summary(start: StartRecord, by_name: Mapping[str, StartRecord]) -> StartSummary:
    offset: int | None = 0
    differs = None
    undisturbed = by_name.get("undisturbed")
    killed = by_name.get(start.name.replace("resumed-again", "killed").replace("resumed", "killed"))
    if killed is not start and killed and undisturbed and undisturbed.steps:
        offset = loaded = matching.loaded_after(killed, start)
        if start.steps:
            again, whole = by_name.get("again"), endings.complete(killed, undisturbed)
            known = noise_between(undisturbed.processes[0], again.first if again else None)
            result = _of_rank(undisturbed.processes[0], known, start.processes[0], loaded, bool(whole), False)
            offset = result.match.offset
            if {each.rank for each in start.processes} == {each.rank for each in undisturbed.processes}:
                differs = offset + int(result.apart) + 1 if result.apart < _NEVER else None
    about = start.first.about if start.first else {}
    return StartSummary(
        name=start.name,
        command=start.command,
        steps=len(start.steps),
        ranks=len({process.rank for process in start.processes}),
        checkpoints=[checkpoint.after for checkpoint in start.checkpoints],
        epochs=start.first.epochs if start.first else (),
        offset=offset,
        killed=start.killed,
        loaded=start.loaded,
        stopped=start.stopped,
        differs=differs,
        code=start.code,
        wall_s=start.wall_s,
        versions={name: str(about[name]) for name in ("python", "torch") if about.get(name)},
    )
