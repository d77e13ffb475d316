"""The moments at which ``harness verify-resume`` kills a run, chosen at random from what the uninterrupted run did."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.runs import checkpoint, layout
from harness.runs.probe_plan import Kill, Place

_ORDER: tuple[Place, ...] = ("start", "step", "checkpoint", "evaluation", "best weights", "predictions", "upload")
_FIRST: tuple[Place, ...] = ("step", "checkpoint", "evaluation", "start")  # each at least once, if there are so many
_OPERATIONS = {"checkpoint": 11, "best weights": 6}  # syncs and renames in a write, at least
_ONLY_FIRST_RANK = ("checkpoint", "best weights", "predictions", "upload")


class Progress:
    """The progress of a finished run, according to its files."""

    def __init__(self, folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / layout.METRICS).read_text(encoding="utf-8").splitlines()]
        self.evaluations = [line["step"] for line in lines if line["split"] == "eval"]
        self.epochs = sum(line["split"] == "epoch" for line in lines)
        self.checkpoints = sorted(checkpoint.steps(folder / layout.CHECKPOINTS))
        self.last = max(self.checkpoints, default=0)
        self.predicts = (folder / layout.PREDICTIONS).exists()
        self.lines = len(lines)
        summary: dict[str, Any] = json.loads((folder / layout.SUMMARY).read_text(encoding="utf-8"))
        self.wall_s = float(summary.get("wall_s", 0.0))

    def __str__(self) -> str:
        counts = {
            "step": self.last, "epoch end": self.epochs, "evaluation": len(self.evaluations),
            "checkpoint": len(self.checkpoints),
        }  # fmt: skip
        return ", ".join(f"{count} {name}{'s' if count != 1 else ''}" for name, count in counts.items())


def choose(
    done: Progress, num: int, world_size: int, startup_s: float, uploads: bool, chance: random.Random
) -> list[Kill]:
    """``num`` moments in the order in which a run reaches them, one of them after the first checkpoint, so that even a
    single kill tests a resume. ``startup_s``: from the command to the first step."""
    more: list[Place] = ["step", "step", "checkpoint", "checkpoint", "evaluation", "best weights", "start"]
    if done.predicts:
        more.append("predictions")
    if uploads:
        more += ["upload", "upload"]
    places = [*_FIRST[:num], *chance.choices(more, k=max(0, num - len(_FIRST)))]
    # The same checkpoint is not written twice, unless the kill came before it was complete.
    writes = chance.sample(done.checkpoints, len(done.checkpoints))
    found: list[Kill] = []
    for place in places:
        steps = {
            "checkpoint": [writes.pop()] if writes else [done.last],
            "evaluation": done.evaluations or [done.last],
            "best weights": done.evaluations[:1] or [done.last],
            "predictions": [done.last],
        }.get(place, range(1, done.last + 1))
        if not found and done.checkpoints and done.checkpoints[0] < done.last:  # the place is "step"
            steps = range(done.checkpoints[0] + 1, done.last + 1)
        kill = Kill(
            place, chance.choice(steps), chance.randrange(world_size), chance.random() < 0.5, chance.randint(1, 2),
            chance.uniform(0.05, 0.95), chance.uniform(0.0, startup_s),
        )  # fmt: skip
        if place in _OPERATIONS:
            number = 0 if place not in {kill.where for kill in found} else chance.randrange(_OPERATIONS[place])
            kill = replace(kill, number=number)
        elif place == "upload":
            kill = replace(kill, number=chance.randint(1, 8))
        found.append(replace(kill, rank=0) if place in _ONLY_FIRST_RANK else kill)
    return sorted(found, key=lambda kill: (kill.step, _ORDER.index(kill.where)))


def planned(kill: Kill) -> str:
    """The place where a run was to be killed."""
    return f"step {kill.step}" + ("" if kill.where in ("start", "step") else f", {kill.where}")


def described(kill: Kill, mark: dict[str, Any], world_size: int) -> str:
    """The place where a run was killed, according to the killed rank."""
    step = f" at step {mark['step']}" if mark["step"] is not None else ""
    written = kill.where in ("checkpoint", "best weights", "predictions")
    place = f"{'while writing' if written else 'during'} the {kill.where}{step}"
    if kill.where in ("start", "step"):
        place = f"in step {mark['step']}" if mark["step"] is not None else "during startup"
    who = "" if world_size == 1 else ", all ranks" if kill.everyone else f", rank {mark['rank']} alone"
    return f"{place}, {mark['detail']}{who}"
