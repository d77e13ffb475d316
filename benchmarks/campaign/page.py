"""The result page: a table per dimension, and the failures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import machine

_KINDS = ("wrong bits", "hang", "stray file", "exit code", "failed")
_HEADER = ["chains", "kills", "wrong bits", "hangs", "stray files", "wrong exit codes", "other", "slowest end, s"]
_OF_KILLS = ("signal", "target", "place", "operation", "ranks")

_EXPLANATION = """\
A chain is one configuration that is killed up to six times and then finished. It is compared with an uninterrupted
run, bit for bit, by the code of `harness verify-resume` and by digests that share no code with it: weights, optimizer,
loss scale, moving average, random streams, position, log, summary, predictions. A stray file is any file that the
uninterrupted run does not leave. An end is the time from the signal until the last process has exited, including loader
workers; 30 s are allowed. The operation is the one that the kill interrupts; an interrupted write stays incomplete.
Ranks of the engine `bare` are forked from a process that has imported torch, and read RANK and WORLD_SIZE from the
environment."""


def text(results: Sequence[dict[str, Any]], seed: int, commit: str, date: str, wall_s: float) -> str:
    """The page as Markdown, without its title and machine."""
    total = _line(results, [kill for result in results for kill in result["kills"]])
    parts = [
        f"Seed {seed}, commit {commit}, {date}; {wall_s / 60:.0f} minutes.",
        machine.table(_HEADER, [total]),
        _EXPLANATION,
    ]
    for name, rows in _dimensions(results):
        parts += [f"## By {name}", machine.table([name, *_HEADER], rows)]
    parts += ["## Failures", _failures(results)]
    return "\n\n".join(parts)


def _line(results: Iterable[dict[str, Any]], kills: Sequence[dict[str, Any]]) -> list[str]:
    chains = list(results)
    counts = [sum(any(p["kind"] == kind for p in chain["problems"]) for chain in chains) for kind in _KINDS]
    slowest = max((kill["end_s"] for kill in kills), default=0.0)
    return [str(len(chains)), str(len(kills)), *map(str, counts), f"{slowest:.1f}"]


def _dimensions(results: Sequence[dict[str, Any]]) -> Iterable[tuple[str, list[list[str]]]]:
    """(dimension, its rows). A chain counts in each row that one of its kills, or one of its options, belongs to."""
    for name in results[0]["traits"] if results else ():
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for result in results:
            for value in result["traits"][name].split(",") if name == "option" else [result["traits"][name]]:
                groups[value].append(result)
        yield (
            name,
            [
                [value, *_line(chains, [kill for chain in chains for kill in chain["kills"]])]
                for value, chains in sorted(groups.items())
            ],
        )
    for name in _OF_KILLS:
        kills: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(list)
        for result in results:
            for kill in result["kills"]:
                kills[str(kill[name])].append((result, kill))
        yield (
            name,
            [
                [value, *_line({id(chain): chain for chain, _ in pairs}.values(), [kill for _, kill in pairs])]
                for value, pairs in sorted(kills.items())
            ],
        )


def _failures(results: Iterable[dict[str, Any]]) -> str:
    lines = [
        f"- `make campaign CHAIN={result['name']}`: {problem['kind']}: {problem['text']}"
        for result in results
        for problem in result["problems"]
    ]
    return "\n".join(lines) or "None."
