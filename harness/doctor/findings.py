"""What a check finds, how a check is kept from failing or hanging, and how findings are shown. No check lives here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Mark = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``note``: training works, but not as well as it might. ``remedies``: what to type."""

    check: str
    mark: Mark
    text: str
    remedies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where the checks look: environment variables, the root of the file system, the folder to train in."""

    variables: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")
    folder: Path = Path()


Check = Callable[[Place], Iterator[Finding]]


def look(check: Check, place: Place, timeout_s: float) -> list[Finding]:
    """What ``check`` finds; one finding if it fails or does not end in time (a driver or a mount may hang).

    A check that cannot be made because a package is missing is a note: the check of packages tells the problem.
    """
    name, findings, failure = check.__name__, list[Finding](), list[BaseException]()

    def run() -> None:
        try:
            findings.extend(check(place))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name=f"doctor-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        remedy = "look at what it asks: a hanging driver (nvidia-smi), file system (df) or import"
        return [*findings, Finding(name, "problem", f"no answer within {timeout_s:g} s", (remedy,))]
    if failure:
        missing = isinstance(failure[0], ImportError)
        text = f"could not be looked at: {type(failure[0]).__name__}: {failure[0]}"
        return [*findings, Finding(name, "note" if missing else "problem", text)]
    return findings


def as_text(findings: Sequence[Finding]) -> str:
    """One line a finding, its remedies under it, and a last line that counts."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.mark:<7}  {finding.check:<{width}}  {finding.text}")
        lines += [f"{'':<7}  {'':<{width}}    -> {remedy}" for remedy in finding.remedies]
    return "\n".join([*lines, "", _count(findings)])


def as_json(findings: Sequence[Finding], facts: Mapping[str, str]) -> str:
    """An object of ``facts``, the number of problems, and the findings."""
    problems = sum(finding.mark == "problem" for finding in findings)
    return json.dumps({**facts, "problems": problems, "findings": [asdict(finding) for finding in findings]}, indent=2)


def _count(findings: Sequence[Finding]) -> str:
    problems, notes = (sum(finding.mark == mark for finding in findings) for mark in ("problem", "note"))
    if not problems:
        return "Nothing here keeps training from working." + (f" Notes: {notes}." if notes else "")
    return f"Problems: {problems}. Notes: {notes}."
