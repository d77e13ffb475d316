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

KillPlace = Literal["step", "checkpoint", "write", "evaluation", "operation"]
KillTarget = Literal["all", "rank", "launcher"]
Detail = Literal["tensors", "places"]
HowKilled = Literal["KILL", "TERM", "INT"]


@dataclass(frozen=True)
class PlannedKill:
    """The moment at which a start is killed, counted from 1 in this start, by the rank ``rank``.

    step: before the ``number``-th optimizer step begins
    checkpoint: right after the ``number``-th checkpoint file is complete
    write: in the middle of the ``number``-th checkpoint file, after ``fraction`` of its data
    evaluation: before the ``number``-th call of the outermost module outside of training
    operation: before the ``number``-th time that a file in ``roots`` is opened to write, renamed or removed, or a
        folder made, since the process has an optimizer
    after: optimizer steps before which nothing is counted; not for "step"
    target: all processes; this rank alone, and its launcher has to notice; or the process that started it
    delay_s: seconds from the place to the kill, in which the process goes on
    """

    place: KillPlace
    number: int
    fraction: float = 0.5
    rank: int = 0
    target: KillTarget = "all"
    after: int = 0
    delay_s: float = 0.0


@dataclass(frozen=True)
class AuditPlan:
    """What the recorder does in one start.

    records: the folder for its records, and for the mark of the kill
    steps: every process ends after so many optimizer steps
    until: digests of weights by name; every process ends after the step that began with these weights
    detail: digests of each tensor; or none, only the places of kills
    roots: the folders that checkpoints belong in
    thorough: every change of a file in ``roots`` is an operation, from the start of the process on: also each part that
        is written, in the middle of which it is killed, and each fsync
    draws: also record which lines draw random numbers, which makes the start a few times slower
    chance: also record the sources of chance: draws of entropy, clocks, and operations that are not deterministic
    attributes: steps before which the attributes of models, optimizers and the script's own objects are recorded
    """

    records: str
    kill: PlannedKill | None = None
    steps: int | None = None
    until: Mapping[str, str] | None = None
    signal: HowKilled = "KILL"
    detail: Detail = "tensors"
    roots: tuple[str, ...] = ()
    thorough: bool = False
    draws: bool = False
    chance: bool = False
    attributes: tuple[int, ...] = ()

    def write(self, path: Path) -> Path:
        write_atomically(path, json.dumps(asdict(self)) + "\n")
        return path
