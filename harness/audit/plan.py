"""The plan of one start of an audited command: a JSON file that the variable RESUME_AUDIT of its processes names. The
recorder in ``harness/audit/hook`` carries it out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from harness.runs.files import write_atomically

PLAN = "RESUME_AUDIT"

KillPlace = Literal["step", "checkpoint", "write"]
Detail = Literal["tensors", "sums"]
HowKilled = Literal["KILL", "TERM"]


@dataclass(frozen=True)
class PlannedKill:
    """The moment at which a start is killed, counted from 1 in this start, by rank 0.

    step: before the ``number``-th optimizer step begins
    checkpoint: right after the ``number``-th checkpoint file is complete
    write: in the middle of the ``number``-th checkpoint file, after ``fraction`` of its data
    """

    place: KillPlace
    number: int
    fraction: float = 0.5


@dataclass(frozen=True)
class AuditPlan:
    """What the recorder does in one start.

    records: the folder for its records, and for the mark of the kill
    steps: every process ends after so many optimizer steps
    until: digests of weights by name; every process ends after the step that began with these weights
    roots: the folders that checkpoints belong in
    draws: also record which lines draw random numbers, which makes the start a few times slower
    """

    records: str
    kill: PlannedKill | None = None
    steps: int | None = None
    until: Mapping[str, str] | None = None
    signal: HowKilled = "KILL"
    detail: Detail = "tensors"
    roots: tuple[str, ...] = ()
    draws: bool = False

    def write(self, path: Path) -> Path:
        write_atomically(path, json.dumps(asdict(self)) + "\n")
        return path
