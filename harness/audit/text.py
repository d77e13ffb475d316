"""A verdict about a resume as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from harness.audit.verdict import EXACT, StartSummary, Verdict
from harness.errors import plural


def lines(verdict: Verdict) -> Iterator[str]:
    """Yield the starts, the findings with their evidence, and the verdict in one line at the end."""
    for start in verdict.starts:
        yield f"{start.name}: {'; '.join(_facts(start))}"
    for note in verdict.notes:
        yield f"note: {note}"
    for finding in verdict.findings:
        place = f" ({finding.place})" if finding.place else ""
        yield ""
        yield f"{finding.code}: {finding.title}{place}"
        yield f"  {finding.text}"
        yield from (f"    {line}" for line in finding.evidence)
        if finding.advice:
            yield f"  -> {finding.advice}"
    if verdict.findings:
        yield ""
    yield summary(verdict)


def summary(verdict: Verdict) -> str:
    """Return the verdict in one line."""
    if verdict.kind != EXACT:
        return f"{verdict.kind}: {'; '.join(finding.title for finding in verdict.findings)}"
    places = [_kill(start) for start in verdict.starts if start.killed is not None]
    steps = verdict.starts[0].steps if verdict.starts else 0
    return (
        f"exact: killed {plural(len(places), 'time')} and resumed, the training equals the undisturbed one bit for bit "
        f"({plural(steps, 'step')}), killed {'; '.join(places)}{' (--kills tries other places)' * (len(places) == 1)}"
    )


def _facts(start: StartSummary) -> Iterator[str]:
    """Yield what is known of a start, in steps of the undisturbed start."""
    offset = start.offset or 0
    done = plural(start.steps, "step")
    if start.steps and offset:
        done = f"steps {offset + 1} to {offset + start.steps}"
    yield done + (f" on {start.ranks} ranks" if start.ranks > 1 else "") + f" in {start.wall_s:.1f} s"
    if saved := [offset + after for after in start.checkpoints]:
        shown = ", ".join(map(str, saved[:6])) + (f" and {len(saved) - 6} more" if len(saved) > 6 else "")
        yield f"checkpoint{'s' * (len(saved) > 1)} after {'step' if saved[-1] else 'the start,'} {shown}"
    if start.killed:
        yield f"killed {_kill(start)}"
    elif start.code:
        yield f"exit code {start.code}"
    if start.differs:
        yield f"differs from step {start.differs} on"


def _kill(start: StartSummary) -> str:
    killed = start.killed or {}
    path = str(killed.get("path") or "").rpartition("/")[2]
    places = {
        "checkpoint": f"right after {path} was written", "write": f"while {path} was being written",
        "operation": f"before an operation on {path}", "evaluation": "in an evaluation",
    }  # fmt: skip
    place = places.get(str(killed.get("place")))
    done = int(killed.get("step", start.steps))
    place = f"{place} after step {done}" if place else f"before step {done + 1}"
    return place + (f", rank {killed['rank']} alone" if killed.get("target") == "rank" else "")
