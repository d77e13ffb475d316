"""A verdict in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from harness.audit.verdict import EXACT, Finding, Verdict
from harness.errors import plural


def lines(verdict: Verdict) -> Iterator[str]:
    if verdict.kind == EXACT:
        kills = sum(start.killed is not None for start in verdict.starts)
        steps = verdict.starts[0].steps if verdict.starts else 0
        yield f"{EXACT}: killed {plural(kills, 'time')}, the resumed command equals the undisturbed one bit for bit"
        yield f"  ({plural(steps, 'step')}: rows, weights, optimizer state, random streams, checkpoints)"
        return
    for number, finding in enumerate(verdict.findings):
        yield from _finding(finding, f"{verdict.kind}: " if not number else "")


def _finding(finding: Finding, before: str) -> Iterator[str]:
    place = f" ({finding.place})" if finding.place else ""
    yield f"{before}{finding.code}: {finding.title}{place}"
    yield f"  {finding.text}"
    for line in finding.evidence:
        yield f"    {line}"
    if finding.advice:
        yield f"  -> {finding.advice}"
