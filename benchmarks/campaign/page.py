"""The result page: a table per dimension, and the failures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import machine

_KINDS = ("wrong bits", "hang", "stray file", "exit code", "failed")
_HEADER = ["chains", "kills", "wrong bits", "hangs", "stray files", "wrong exit codes", "other", "slowest end, s"]
_OF_KILLS = ("signal", "target", "place", "operation", "ranks at the kill")

_EXPLANATION = """\
A chain is one configuration that is killed up to six times and then finished. It is compared with an uninterrupted
run, bit for bit, by the code of `harness verify-resume` and by digests that share no code with it: weights, optimizer,
loss scale, moving average, random streams, position, log, summary, predictions. A stray file is any file that the
uninterrupted run does not leave. An end is the time from the signal until the last process has exited, including loader
workers; 30 s are allowed. The operation is the one that the kill interrupts; an interrupted write stays incomplete.
Ranks of the engine `bare` are forked from a process that has imported torch, and read RANK and WORLD_SIZE from the
environment."""
_LOGICAL = """\
Here, each start of a chain has another number of ranks, from one to `parallel.logical_ranks`, and so has the
uninterrupted run."""


def text(
    results: Sequence[dict[str, Any]], seed: int, commit: str, date: str, wall_s: float, logical_ranks: bool = False
) -> str:
    """The page as Markdown, without its title and machine."""
    total = _line([(result, result["kills"]) for result in results])
    parts = [
        f"Seed {seed}, commit {commit}, {date}; {wall_s / 60:.0f} minutes.",
        machine.table(_HEADER, [total]),
        _EXPLANATION,
        *([_LOGICAL] if logical_ranks else []),
    ]
    for name, rows in _dimensions(results):
        parts += [f"## By {name}", machine.table([name, *_HEADER], rows)]
    parts += ["## Failures", _failures(results)]
    return "\n\n".join(parts)


def _line(found: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]]) -> list[str]:
    """The cells of some (chain, kills of it)."""
    chains = {chain["name"]: chain for chain, _ in found}.values()
    ends = [kill["end_s"] for _, kills in found for kill in kills]
    counts = [sum(any(p["kind"] == kind for p in chain["problems"]) for chain in chains) for kind in _KINDS]
    return [str(len(chains)), str(len(ends)), *map(str, counts), f"{max(ends, default=0.0):.1f}"]


def _dimensions(results: Sequence[dict[str, Any]]) -> Iterable[tuple[str, list[list[str]]]]:
    """(dimension, its rows). A chain counts in each row that one of its kills, or one of its options, belongs to."""
    found: dict[tuple[str, str], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        for name, value in result["traits"].items():
            for each in value.split(",") if name == "option" else [value]:
                found["chain", name][each].append((result, result["kills"]))
    for result in results:
        for kill in result["kills"]:
            for name in _OF_KILLS:
                found["kill", name][str(kill[name])].append((result, [kill]))
    for (_, name), groups in found.items():
        yield name, [[value, *_line(groups[value])] for value in sorted(groups)]


def _failures(results: Iterable[dict[str, Any]]) -> str:
    lines = [
        f"- `make campaign CHAIN={result['name']}`: {problem['kind']}: {problem['text']}"
        for result in results
        for problem in result["problems"]
    ]
    return "\n".join(lines) or "None."
