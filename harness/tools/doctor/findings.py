"""A finding, a check that yields findings, and the running of a check that may fail or hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Mark = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``note``: training works, but could work better. ``remedies``: commands or settings."""

    check: str
    mark: Mark
    text: str
    remedies: tuple[str, ...] = ()


@dataclass(frozen=True)
class System:
    """Inputs of the checks: environment variables, the root of the file system, the folder to train in."""

    variables: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")
    folder: Path = Path()


Check = Callable[[System], Iterator[Finding]]


def run_check(check: Check, system: System, timeout_s: float) -> list[Finding]:
    """The findings of ``check``; a check that fails, or does not finish in time, adds a finding of its own.

    A driver or a mount may hang, so the check runs in a thread. A check that cannot import a package is only a note,
    because the check of packages reports the problem.
    """
    name, findings, failure = check.__name__, list[Finding](), list[BaseException]()

    def run() -> None:
        try:
            findings.extend(check(system))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name=f"doctor-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        remedy = "check whether the driver (nvidia-smi), a file system (df) or an import hangs"
        return [*findings, Finding(name, "problem", f"no answer within {timeout_s:g} s", (remedy,))]
    if failure:
        missing = isinstance(failure[0], ImportError)
        text = f"the check failed: {type(failure[0]).__name__}: {failure[0]}"
        return [*findings, Finding(name, "note" if missing else "problem", text)]
    return findings
