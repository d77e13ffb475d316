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
    """

    place: KillPlace
    number: int
    fraction: float = 0.5
    rank: int = 0
    target: KillTarget = "all"
    """Which processes: all; this rank alone, and its launcher has to notice; or the process that started it."""
    after: int = 0
    """Optimizer steps before which nothing is counted; not for "step"."""
    delay_s: float = 0.0
    """Seconds from the place to the kill, in which the process goes on."""


@dataclass(frozen=True)
class AuditPlan:
    """What the recorder does in one start."""

    records: str
    """The folder for its records, and for the mark of the kill."""
    kill: PlannedKill | None = None
    steps: int | None = None
    """Every process ends after so many optimizer steps."""
    until: Mapping[str, str] | None = None
    """Digests of weights by name; every process ends after the step that began with these weights."""
    signal: HowKilled = "KILL"
    detail: Detail = "tensors"
    """Digests of each tensor; or none, only the places of kills."""
    roots: tuple[str, ...] = ()
    """The folders that checkpoints belong in."""
    thorough: bool = False
    """True if every change of a file in ``roots`` is an operation, from the start of the process on: also each part
    that is written, in the middle of which it is killed, and each fsync."""
    draws: bool = False
    """True to record which lines draw random numbers, which makes the start a few times slower."""
    chance: bool = False
    """True to record the sources of chance: draws of entropy, clocks, and operations that are not deterministic."""
    attributes: tuple[int, ...] = ()
    """Steps before which the attributes of models, optimizers and the script's own objects are recorded."""

    def write(self, path: Path) -> Path:
        write_atomically(path, json.dumps(asdict(self)) + "\n")
        return path
