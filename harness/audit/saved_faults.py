"""What differs in later checkpoints, and in tensors beside the model, although training goes on equally."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from harness.audit.differences import Noise, named, unequal
from harness.audit.records import Checkpoint, Process, StartRecord
from harness.audit.verdict import Finding
from harness.errors import plural

_OF_CLOCKS = {
    "time", "times", "timestamp", "date", "elapsed", "second", "seconds", "secs", "duration", "wall", "speed", "eta",
    "throughput", "memory", "host", "hostname", "pid",
}  # fmt: skip
_OF_STREAMS = {"rng", "random", "generator", "generators", "seed", "states"}
_OF_SETTINGS = {"args", "config", "cfg", "hparams", "hyper", "options", "opts", "start", "resume", "resumed"}
# Names of long lists, which are compared as digests.
_OF_LOGS = {"history", "losses", "loss", "metrics", "log", "logs", "curve", "scores", "rewards"}
_OF_SCHEDULERS = {"_step_count", "num_bad_epochs"}  # torch's; the latter of ReduceLROnPlateau
_DIGEST = re.compile(r"[0-9a-f]{16}")


def in_checkpoints(
    undisturbed: StartRecord, again: StartRecord, resumed: StartRecord, offset: int, until: float
) -> Iterator[Finding]:
    """Compare the checkpoints that both starts wrote at the same step, before the resumed step ``until`` (from 0)."""
    ours = {checkpoint.after: checkpoint for checkpoint in undisturbed.checkpoints}
    same = {checkpoint.after: checkpoint for checkpoint in again.checkpoints}
    counters: dict[str, tuple[int, str]] = {}
    tensors: dict[str, tuple[int, str]] = {}
    for theirs in resumed.checkpoints:
        after = offset + theirs.after
        if after not in ours or theirs.after > until:
            continue
        by_chance = _chance(ours[after], same.get(after))
        for one, other in _pairs(ours[after], theirs):
            if one != other and one not in by_chance:
                text = f"{os.path.basename(other)} instead of {os.path.basename(one)}"
                counters.setdefault(f"the file {os.path.basename(one)}", (after, text))
            first, second = ours[after].files[one], theirs.files[other]
            for name in unequal(first, second):
                kind = _kind(one, name, first.get(name), second.get(name))
                if kind is None or f"{one}:{name}" in by_chance:
                    continue
                text = f"{_shown(second.get(name))} instead of {_shown(first.get(name))}"
                (counters if kind == "counter" else tensors).setdefault(name, (after, text))
    yield from _findings("buffers", tensors, "training is equal, but tensors in the checkpoint are not")
    schedulers = {name.rpartition(".")[0] for name in counters if name.rpartition(".")[2] in _OF_SCHEDULERS}
    schedules = {name: counters.pop(name) for name in [*counters] if name.rpartition(".")[0] in schedulers}
    yield from _findings("learning-rate", schedules, "training is equal so far, but a scheduler is not where it was")
    yield from _findings("counter", counters, "training is equal, but counters of the script are not")


def _findings(code: str, found: dict[str, tuple[int, str]], what: str) -> Iterator[Finding]:
    if found:
        after = min(after for after, _ in found.values())
        lists: dict[str, str] = {}  # the entries of a list together, with the first value of them that differs
        for name, (place, shown) in sorted(found.items(), key=lambda item: _natural(item[0])):
            if place == after:
                lists.setdefault(re.sub(r"\[\d+\]$", "[...]", name), f"{name}: {shown}")
        text = f"{what}: after step {after}, {named(list(lists))}"
        yield Finding(code, text, tuple(lists.values())[:8] if code != "buffers" else (), (after,), tuple(found))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts x[2] before x[10]."""
    return [(int(part or 0), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _chance(one: Checkpoint, other: Checkpoint | None) -> set[str]:
    """Return the files, and "file:name" of values, that differ between two undisturbed starts."""
    found: set[str] = set()
    for ours, theirs in _pairs(one, other) if other else ():
        first, second = one.files[ours], other.files[theirs] if other else {}
        found |= {f"{ours}:{name}" for name in unequal(first, second)} | ({ours} if ours != theirs else set())
    return found


def _pairs(one: Checkpoint, other: Checkpoint) -> Iterator[tuple[str, str]]:
    """Pair files by their paths, and others in the order in which they were written. A file that only one start wrote
    is no evidence: the last step of one may be in the middle of the other."""
    yield from ((path, path) for path in one.files if path in other.files)
    ours = [path for path in one.files if path not in other.files]
    theirs = [path for path in other.files if path not in one.files]
    if len(ours) == len(theirs):
        yield from zip(ours, theirs, strict=True)


def _kind(path: str, name: str, one: Any, other: Any) -> Literal["counter", "tensor"] | None:
    """Return "counter" for numbers and "tensor" for digests; None for a value that need not be equal.

    These are times, texts, settings, and random streams, which are compared at each step.
    """
    words = set(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", f"{os.path.basename(path)} {name}").lower()))
    last = set(re.findall(r"[a-z]+", name.lower().rpartition(".")[2]))
    is_log_offset = {"log", "offset"} <= last  # bytes of a log, which vary with the digits of the times in it
    if is_log_offset or last & _OF_CLOCKS or words & (_OF_STREAMS | _OF_SETTINGS):
        return None
    values = [value for value in (one, other) if value is not None]
    if all(map(_is_number, values)):
        return None if any(map(_is_clock, values)) else "counter"
    if not all(map(_is_digest, values)):
        return None
    return "counter" if last & _OF_LOGS else "tensor"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or value in ("nan", "inf", "-inf")


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _is_clock(value: Any) -> bool:
    """Return True for seconds since 1970."""
    return isinstance(value, float) and 1e9 < value < 4e9


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def beside_the_model(undisturbed: Process, resumed: Process, offset: int, until: float, known: Noise) -> Finding | None:
    """Compare modules that are not trained, such as an average of the weights, where both starts recorded them.

    A copy that a start made for a moment, or a sum for its log, is not evidence: what is blamed differs at the first
    resumed step and ever after.
    """
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (ours.others, theirs.others)
        for index, (ours, theirs) in enumerate(zip(undisturbed.steps[offset:], resumed.steps, strict=False))
        if ours.others is not None and theirs.others is not None and index <= until
    ]
    ended_together = len(resumed.steps) == len(undisturbed.steps) - offset
    if ended_together and len(resumed.steps) < until and undisturbed.end and resumed.end:
        pairs.append((undisturbed.at_end("others"), resumed.at_end("others")))
    if not pairs or resumed.steps[0].others is None:
        return None
    names = set(known.without("others", unequal(*pairs[0], in_both=True)))
    for ours, theirs in pairs[1:]:
        names -= {name for name in names if name in ours and ours[name] == theirs.get(name)}
    kinds = {name: pairs[0][0][name]["kind"] for name in names}
    averages = {name for name in names if kinds[name] == "unnamed" and _is_average(undisturbed, pairs, name)}
    names = averages | {name for name in names if kinds[name] == "module"}
    if not names:
        return None
    text = f"before step {offset + 1}, tensors beside the trained model differ: {named(sorted(names))}"
    evidence = (f"they differ at {plural(len(pairs), 'place')} that both starts recorded",)
    return Finding("buffers", text, evidence, (offset + 1,), tuple(sorted(names)))


def _is_average(undisturbed: Process, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], name: str) -> bool:
    """Return True if tensors without a name can be compared.

    They were looked at in both starts at two steps or more, are equally many there, and change in the undisturbed one.
    """
    both = [(ours[name], theirs[name]) for ours, theirs in pairs if name in ours and name in theirs]
    seen = [step.others[name] for step in undisturbed.steps if step.others and name in step.others]
    moves = any(value != seen[0] for value in seen)
    are_as_many = all(len(ours["digests"]) == len(theirs["digests"]) for ours, theirs in both)
    return len(both) > 1 and are_as_many and moves


def generators(undisturbed: Process, resumed: Process, offset: int, known: Noise) -> Sequence[str]:
    """Return the random generators of the script's own that differ at the first resumed step."""
    ours = undisturbed.steps[offset].others if offset < len(undisturbed.steps) else None
    ours = ours or {}
    names = known.without("others", unequal(ours, resumed.steps[0].others or {}, in_both=True))
    return [name for name in names if ours[name]["kind"] == "generator"]
