"""Instructions of ``harness verify-resume`` for the ranks of one start: where to kill them, and what to record.

A plan is a JSON file that the variable PROBE of the ranks' environment names. ``harness.training.probe`` carries it
out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from harness.runs.files import write_atomically

PROBE = "APEX_HARNESS_PROBE"

Place = Literal["start", "step", "checkpoint", "best weights", "evaluation", "predictions", "upload"]


@dataclass(frozen=True)
class Kill:
    """SIGKILL to the rank that is the first to reach a place.

    step: the first step at which it may be killed there; any later one will do, too. Starts and uploads have none
    rank: only this rank is killed first. Checkpoints, best weights and uploads are rank 0's
    everyone: the other ranks are killed, too; otherwise they notice the loss of a peer
    number: 0 cuts a checkpoint in the middle of its data, k > 0 is before its k-th sync or rename. Of an evaluation,
        the predictions or the uploads: the batch or file, from 1
    fraction: how much of the data of a checkpoint is written before the cut
    after_s: seconds since the process was started, for the place "start"
    """

    where: Place
    step: int = 0
    rank: int = 0
    everyone: bool = True
    number: int = 1
    fraction: float = 0.5
    after_s: float = 0.0


@dataclass(frozen=True)
class ProbePlan:
    """``mark``: the file that a rank writes just before it is killed. ``observe``: a folder for draws of random numbers
    and for attributes after the steps ``steps``."""

    mark: str = ""
    kill: Kill | None = None
    observe: str = ""
    steps: tuple[int, ...] = ()

    def write(self, path: Path) -> Path:
        write_atomically(path, json.dumps(asdict(self)) + "\n")
        return path


def read(path: str) -> ProbePlan:
    content: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    kill = Kill(**content["kill"]) if content["kill"] else None
    return ProbePlan(content["mark"], kill, content["observe"], tuple(content["steps"]))
