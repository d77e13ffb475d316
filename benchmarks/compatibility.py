"""Writes docs/compatibility.md from ``compatibility.json``, the record of what was run.

    python -m benchmarks.compatibility

After a run, edit its record; nothing on the page is written by hand.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import table

RECORDS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"

OUTCOMES = {
    "trains": "takes at least two steps, and every loss that it prints is finite",
    "starts": "gets past `amp.initialize`, but does not take two steps within the time limit",
    "ours": "stopped by `harness.apex`",
    "other": "stopped by something that has nothing to do with Apex",
    "not run": "",
}
RESUMES = {"yes": "yes", "no": "not tried", "cannot": "cannot"}


@dataclass(frozen=True)
class Run:
    """A project or a library, and what happened when it was run."""

    name: str
    version: str
    """Commit of a project, version of a library."""
    outcome: str
    command: str = ""
    date: str = ""
    ranks: int = 1
    steps: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    resumed: str = "no"
    """A key of RESUMES."""
    idioms: tuple[str, ...] = ()
    bridges: tuple[str, ...] = ()
    """Names that other libraries have removed, and that were put back for the run."""
    edited: str = ""
    """What was edited in the project."""
    note: str = ""

    def __post_init__(self) -> None:
        problems = [
            self.outcome not in OUTCOMES and f"outcome {self.outcome!r}",
            self.resumed not in RESUMES and f"resumed {self.resumed!r}",
            self.outcome == "trains"
            and not (self.command and self.date and self.steps >= 2)
            and "no command, date, steps",
            self.outcome not in ("trains", "not run") and not self.note and "no reason in note",
        ]
        if any(problems):
            raise ValueError(f"{RECORDS}: record of {self.name}: {', '.join(p for p in problems if p)}")

    @property
    def learns(self) -> bool:
        """True if it trains and the last loss is below the first by more than 1 %."""
        if self.outcome != "trains" or self.first_loss is None or self.last_loss is None:
            return False
        return self.first_loss - self.last_loss > 0.01 * abs(self.first_loss)


def read(records: Path = RECORDS) -> dict[str, Any]:
    """The record: runs under "projects" and "libraries", the rest as in the file."""
    content = json.loads(records.read_text())
    for part in ("projects", "libraries"):
        content[part] = [
            Run(**{k: tuple(v) if isinstance(v, list) else v for k, v in r.items()}) for r in content[part]
        ]
    return dict(content)


def page(record: dict[str, Any]) -> str:
    """The whole page as Markdown."""
    projects, libraries = record["projects"], record["libraries"]
    return (
        "\n\n".join(
            [
                "# Public Apex projects and libraries",
                "<!-- Written by make compatibility from benchmarks/compatibility.json: edit that file. -->",
                record["introduction"],
                record["choice"],
                _counts(projects),
                record["limits"],
                f"Idioms that trained in more than one run: {_by_idiom([*projects, *libraries])}.",
                "## By library",
                record["about libraries"],
                _trained(libraries, "library", lambda run: run.note),
                _stopped(libraries, "library"),
                "## By project",
                record["about projects"],
                _trained(projects, "project", lambda run: "" if run.learns else run.note),
                _stopped(projects, "project"),
            ]
        )
        + "\n"
    )


def _counts(projects: Sequence[Run]) -> str:
    of = {outcome: [run for run in projects if run.outcome == outcome] for outcome in OUTCOMES}
    text = {outcome: f"*{outcome}*" + (f": {meaning}" if meaning else "") for outcome, meaning in OUTCOMES.items()}
    runnable = len(projects) - len(of["other"])
    falls = [run for run in of["trains"] if run.learns]
    able = [run for run in of["trains"] if run.resumed != "cannot"]
    whole = [run for run in falls if run.resumed in ("yes", "cannot")]
    rows = [("chosen", f"{len(projects)}"), (text["other"], f"{len(of['other'])}"), ("the rest", f"{runnable}")]
    rows += [(f"of these, {text[name]}", f"{len(of[name])}") for name in OUTCOMES if name != "other" and of[name]]
    rows += [
        ("of those that train, the loss falls by more than 1 %", f"{len(falls)}"),
        ("of those that train, the script supports resuming", f"{len(able)}"),
        ("of these, resumed from their own checkpoints", f"{sum(run.resumed == 'yes' for run in able)}"),
        ("**of the rest, train with a falling loss, and resume if the script can**", _share(len(whole), runnable)),
    ]
    return table(["", "projects"], [list(row) for row in rows])


def _share(part: int, whole: int) -> str:
    return f"**{part} of {whole}" + (f" ({100 * part / whole:.0f} %)**" if whole else "**")


def _by_idiom(runs: Iterable[Run]) -> str:
    trained = Counter(idiom for run in runs if run.outcome == "trains" for idiom in run.idioms)
    return "; ".join(f"{idiom}: {number}" for idiom, number in trained.most_common() if number > 1)


def _named(run: Run) -> str:
    return run.name if len(run.version) == 40 else f"{run.name}, {run.version}"


def _trained(runs: Iterable[Run], what: str, note: Callable[[Run], str]) -> str:
    rows = []
    for run in (run for run in runs if run.outcome not in ("other", "not run")):
        changes = {"edited": run.edited, "put back": ", ".join(run.bridges)}
        parts = ["" if run.outcome == "trains" else run.outcome, "two ranks" if run.ranks == 2 else "", note(run)]
        parts += [f"{kind}: {text}" for kind, text in changes.items() if text]
        has_losses = run.first_loss is not None and run.last_loss is not None
        losses = f"{run.first_loss:.4g} to {run.last_loss:.4g}" if has_losses else ""
        rows.append([_named(run), losses, RESUMES[run.resumed], "; ".join(part for part in parts if part)])
    return table([what, "loss", "resumed", ""], rows)


def _stopped(runs: Iterable[Run], what: str) -> str:
    stopped = [run for run in runs if run.outcome in ("other", "not run")]
    return table([f"{what} that stopped", "because it"], [[_named(run), run.note] for run in stopped])


def main() -> None:
    PAGE.write_text(page(read()))


if __name__ == "__main__":
    main()
