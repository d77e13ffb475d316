"""Reads run folders and sweep folders, for commands that compare or show them.

The meaning of the numbers is in ``harness.tools.report`` and ``harness.tools.compare``. Torch is not needed.
Incomplete and damaged files are not errors; they are listed in the ``problems`` of the record.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from harness.config import merge
from harness.distributed.rank_exit import Cause
from harness.errors import ConfigError
from harness.runs import exit_files, hints, layout, metrics_table, sweep_folder
from harness.runs.files import read_or_empty, read_text
from harness.runs.locks import is_held
from harness.runs.sweep_folder import Sweep, Trial

RunState = Literal["finished", "running", "stopped", "pruned", "failed", "unfinished", "waiting", "unreadable"]
"""finished: trained to its end · running: a process holds its lock · stopped: on request, with a checkpoint · pruned:
by its sweep · failed: has a failure.json · unfinished: killed, or running where this machine does not see the lock, as
at a URL · waiting: a trial that has not started · unreadable: no run."""


@dataclass
class Record:
    """A run folder. Fields that could not be read are empty, and ``problems`` has a line about each; ``metrics`` adds
    those of the log."""

    path: Path
    name: str
    state: RunState
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    provenance: list[dict[str, Any]] = field(default_factory=list)
    failure: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    sweep: Sweep | None = None
    trial: Trial | None = None

    @property
    def world_sizes(self) -> list[int]:
        """The number of ranks of each start, in order; equal ones in a row once. Empty if unknown."""
        starts = [start.get("world_size") for start in self.provenance]
        known = [world for world in starts if isinstance(world, int)]
        others = [self.summary.get("world_size"), self.trial.world if self.trial else None]
        return changes(known or [world for world in others if isinstance(world, int)][:1])

    @property
    def world_size(self) -> int | None:
        """The number of ranks; None if it is unknown or changed at a resume."""
        sizes = self.world_sizes
        return sizes[0] if len(sizes) == 1 else None

    @property
    def world_size_text(self) -> str:
        """ "2", or "1, then 2" if the number of ranks changed at a resume; empty if unknown."""
        return str(over_starts(self.world_sizes)) if self.world_sizes else ""

    @property
    def lengths(self) -> dict[str, list[tuple[int, Any]]]:
        """{"train.epochs" or "train.max_steps": [(step from which on it was set to a value, value)]}. More than one
        entry if it changed at a resume; the steps after the checkpoint that a start resumed from do not count."""
        found: dict[str, list[tuple[int, Any]]] = {}
        for start in self.provenance:
            length = start.get("length")
            if isinstance(length, dict) and isinstance(step := length.get("step"), int):
                for key, value in length.items():
                    kept = [entry for entry in found.get(key, []) if entry[0] < step]
                    found[key] = kept if kept and kept[-1][1] == value else [*kept, (step, value)]
        found.pop("step", None)
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the state and the results: what ``harness report --json`` prints."""
        results = {key: self.summary.get(key) for key in ("epoch", "step", "evaluation", "best", "wall_s")}
        return {"path": str(self.path), "name": self.name, "state": self.state, "world_sizes": self.world_sizes,
                **results, "failure": self.failure or None, "trial": asdict(self.trial) if self.trial else None,
                "problems": self.problems}  # fmt: skip

    def metrics(self) -> pa.Table:
        """Return ``metrics.jsonl``, one row per line; keys that a line does not have are null.

        The columns of training lines always exist. Lines that are not JSON are left out and added to ``problems``.
        """
        table, problem = metrics_table.read(self.path / layout.METRICS)
        if problem and problem not in self.problems:
            self.problems.append(problem)
        return table

    def lacking(self, what: str, hint: str) -> ConfigError:
        """Return the error of a command that needs ``what``, which the run does not have. One that has failed tells
        why; ``hint`` is for any other."""
        text = str(self.failure.get("message") or self.failure.get("error") or "").strip()
        if self.state != "failed" or not text:
            return ConfigError(f"this run has no {what} yet", where=str(self.path), hint=hint)
        when = f"at step {step}" if (step := self.failure.get("step")) else "at its start"
        why = f"this run failed {when} and has no {what}: {text.splitlines()[0]}"
        mend = str(self.failure.get("hint") or "mend this").splitlines()[0]
        return ConfigError(why, where=str(self.path), hint=f"{mend}; then start it again with the same command")


def ranks(start: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return {"host", "device", "name" of the device} of each rank of a start in provenance.json; empty if it lacks
    them."""
    found = start.get("ranks")
    known = [rank for rank in found if isinstance(rank, dict)] if isinstance(found, list) else []
    return [{key: str(rank.get(key) or "unknown") for key in ("host", "device", "name")} for rank in known]


def changes(values: Iterable[Any]) -> list[Any]:
    """Return ``values`` without those that equal the one before."""
    found: list[Any] = []
    for value in values:
        if not found or found[-1] != value:
            found.append(value)
    return found


def over_starts(values: Iterable[Any]) -> Any:
    """Return the value that all starts of a run have; "first, then second" if it was resumed with another one."""
    found = changes(values)
    return found[0] if len(found) == 1 else ", then ".join(map(str, found))


def section(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the object ``key`` of ``content``; empty in place of a value of another type."""
    value = content.get(key)
    return value if isinstance(value, dict) else {}


# Reading


def read(path: Path) -> Record:
    """Return the run folder at ``path``. Never raises."""
    if not os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        return Record(path, path.name, "unreadable", problems=["there is no such folder"])
    problems: list[str] = []
    config = read_or_empty(path / layout.CONFIG, dict, problems, lambda file: merge.load_yaml(read_text(file)))
    summary = read_or_empty(path / layout.SUMMARY, dict, problems)
    failure = read_or_empty(path / layout.FAILURE, dict, problems)
    provenance = [start for start in read_or_empty(path / layout.PROVENANCE, list, problems) if isinstance(start, dict)]
    problems += [str(start["log_damage"]) for start in provenance if start.get("log_damage")]
    if not is_run(path):
        return Record(path, path.name, "unreadable", problems=["this is not a run folder", *problems])
    if os.path.exists(path / layout.FAILURE):
        state: RunState = "failed"
    elif is_held(path):
        state = "running"
    elif summary.get("finished") is True:
        state = "finished"
    else:
        state = "stopped" if _was_stopped(path) else "unfinished"
    problems += _missing(path, state)
    name = config.get("name") or summary.get("name") or path.name
    return Record(path, str(name), state, config, summary, provenance, failure, problems)


def is_run(path: Path) -> bool:
    """Return True if ``path`` has any file of a run."""
    names = (layout.CONFIG, layout.METRICS, layout.SUMMARY, layout.FAILURE)
    return any(os.path.isfile(path / name) for name in names)  # Path.is_file raises for a folder one may not enter


_NOT_EVALUATED = {
    "stopped": ["it was stopped before its first evaluation"],
    "running": ["it has no evaluation yet"],
    "unfinished": ["it has no evaluation yet"],
}


def _missing(path: Path, state: RunState) -> list[str]:
    """Return the files that a run has since its first evaluation and this one lacks, or that it had none; and whether
    the metrics log ends in mid-line."""
    names: tuple[str, ...] = (layout.CONFIG, layout.PROVENANCE, layout.METRICS, layout.SUMMARY)
    why: list[str] = []
    if not any((path / name).is_file() for name in (layout.SUMMARY, layout.WEIGHTS)):
        names, why = names[:1], _NOT_EVALUATED.get(state, [])
    problems = [f"{name} is missing" for name in names if not (path / name).is_file()]
    return [*problems, *why, *filter(None, [metrics_table.incomplete(path / layout.METRICS)])]


def _was_stopped(path: Path) -> bool:
    first = exit_files.read(path / layout.LOGS).get(0)
    return first is not None and first.cause is Cause.STOPPED


# Finding


def find(paths: Iterable[Path]) -> list[Record]:
    """Return the runs at ``paths``, each once. A path is a run folder, a sweep folder, or a folder of these.

    Raises ConfigError for a path without runs.
    """
    found: dict[Path, Record] = {}
    for path in paths:
        records = list(_below(path))
        if not records:
            raise hints.no_run(path)
        for record in records:
            found.setdefault(record.path.resolve(), record)
    return list(found.values())


def _below(path: Path, depth: int = 1) -> Iterator[Record]:
    """Return the runs in ``path``, which is a run, a sweep, or a folder of these."""
    if (found := sweep_folder.read(path)) is not None:
        yield from _trials(found)
    elif is_run(path):
        yield read(path)
    elif depth and os.path.isdir(path) and os.access(path, os.R_OK):
        for inner in sorted(path.iterdir()):
            if os.path.isdir(inner):
                yield from _below(inner, depth - 1)


def _trials(sweep: Sweep) -> Iterator[Record]:
    """Return the sweep's runs, by number; all folders if ``sweep.json`` cannot be read."""
    if not sweep.trials:
        folders = sorted(path for path in sweep.path.glob(f"{layout.TRIALS}/*") if os.path.isdir(path))
        yield from (replace(read(path), sweep=sweep) for path in folders)
        return
    for trial in sweep.trials:
        record = read(trial.run)
        state = record.state
        if state == "unreadable" and trial.state in ("waiting", "running"):
            state, record = "waiting", replace(record, problems=[])
        elif trial.state == "pruned":
            state = "pruned"
        elif trial.state == "failed" and state != "finished":
            state = "failed"
        yield replace(record, state=state, sweep=sweep, trial=trial)
