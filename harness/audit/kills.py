"""The moments at which an audited command is killed, chosen from what its undisturbed run did."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.audit.plan import PlannedKill
from harness.audit.saved_files import Events, SavedFile, SavedFiles
from harness.errors import plural

MIDDLE, ALL = "middle", "all"


@dataclass(frozen=True)
class ChosenKill:
    """``after``: optimizer steps done before it."""

    kill: PlannedKill
    after: int
    text: str


class RunShape:
    """Steps, epochs and checkpoints of an undisturbed run, from the events of rank 0. Checkpoints count if they are in
    ``folders``."""

    def __init__(self, events: Events, folders: Sequence[Path]) -> None:
        self.steps = sum(event["event"] == "step" for event in events)
        self.epochs = sorted({int(event["after"]) for event in events if event["event"] == "epoch"})
        """Numbers of steps after which a pass over the data began."""
        self.operations: list[ChosenKill] = []
        self.evaluations: list[ChosenKill] = []
        self._read(events)
        self.checkpoints: dict[int, list[SavedFile]] = {}
        """{steps done: its files}, without those written before the first step"""
        for file in SavedFiles(events).all:
            if file.after and file.within(folders):
                self.checkpoints.setdefault(file.after, []).append(file)
        self.evaluated = min(self._evaluated(events) & self.checkpoints.keys(), default=math.inf)
        """Steps done at the first checkpoint after an evaluation; infinite if there is none."""

    @staticmethod
    def _evaluated(events: Events) -> set[int]:
        """Return the steps done at checkpoints whose first file came after an evaluation in training."""
        before = next((event.get("evaluations", 0) for event in events if event["event"] == "step"), 0)
        first: dict[int, int] = {}
        for event in events:
            if event["event"] == "written":
                first.setdefault(int(event["after"]), event.get("evaluations", 0))
        return {after for after, evaluations in first.items() if after and evaluations > before}

    def _read(self, events: Events) -> None:
        """Find the kills before operations on files and before calls in evaluations."""
        done = evaluated = 0
        for event in events:
            if event["event"] == "operation":
                text = f"before it {event['name']}s {Path(event['path']).name}, after step {done}"
                self.operations.append(ChosenKill(PlannedKill("operation", event["number"]), done, text))
            elif event["event"] in ("step", "end"):
                calls = max(0, event.get("evaluations", 0) - evaluated)
                for number in range(1, calls + 1):
                    text = f"in an evaluation after step {done}"
                    self.evaluations.append(ChosenKill(PlannedKill("evaluation", number, after=done), done, text))
                evaluated += calls
                done += event["event"] == "step"

    def on_any_ranks(self) -> RunShape:
        """Leave out what other numbers of ranks may not reach: each rank has a first batch of an evaluation."""
        self.evaluations = [each for each in self.evaluations if each.kill.number == 1]
        return self

    def follows_evaluation(self, chosen: ChosenKill) -> bool:
        """Return True if a resume after this kill begins with what an evaluation has left."""
        return self.evaluated < chosen.after + (chosen.kill.place in ("step", "checkpoint"))

    def usable(self) -> list[int]:
        """Return the steps done at each checkpoint, without one at the end of the run, in order."""
        return sorted(after for after in self.checkpoints if after < self.steps)

    def following(self, after: int) -> int:
        """Return the steps done at the first checkpoint later than ``after``; of the run if there is none."""
        return min((other for other in self.checkpoints if other > after), default=self.steps)

    def middle_first(self, places: Sequence[int], *preferences: Callable[[int], bool]) -> list[int]:
        """Return the numbers of steps ``places``, the best first.

        Those that fulfil the first of ``preferences`` come before all others, and so on; of equals, the one nearest to
        the middle of the run comes first.
        """
        return sorted(
            places, key=lambda place: (*(not is_good(place) for is_good in preferences), abs(2 * place - self.steps))
        )

    def in_epoch(self, after: int) -> bool:
        return after not in self.epochs and after < self.steps


def why_none(shape: RunShape) -> str:
    """Return why no kill can test a resume; empty if one can."""
    if shape.usable():
        return ""
    if not shape.checkpoints:
        return (
            "the run wrote no checkpoint: turn them on, or let it save more often. The recorder sees what torch.save, "
            "pickle, safetensors and torch.distributed.checkpoint write"
        )
    return (
        f"the only checkpoint is written at the very end, after step {shape.steps}: let the script save more often, or "
        "train longer"
    )


def untested(shape: RunShape, chosen: Sequence[ChosenKill]) -> str:
    """Return what the kills leave untested; empty if one comes after an evaluation, or if training has none."""
    if not any(each.after for each in shape.evaluations) or any(map(shape.follows_evaluation, chosen)):
        return ""
    how = "train longer, or evaluate more often" if shape.evaluated >= shape.steps else "--kills all adds one"
    return f"no kill comes after an evaluation and a checkpoint, so what an evaluation changes is not tested: {how}"


def choose(shape: RunShape, how: str, seed: int, ranks: int = 1, alone: float = 0.0) -> list[ChosenKill]:
    """Return the kills for ``--kills``: "middle", "all", or a number of random places. Empty if ``why_none``. The share
    ``alone`` of the random ones kills only one of the ``ranks``. But for "middle", one follows an evaluation if it can.
    """
    if not shape.usable():
        return []
    if how == MIDDLE:
        return [_in_the_middle(shape)]
    if how == ALL:
        wanted = [_after_checkpoint(shape), _in_the_middle(shape), _end_of_epoch(shape), _torn(shape)]
        unique = {kill.kill: kill for kill in wanted if kill is not None}
        late = [after for after in shape.usable() if after >= shape.evaluated]
        if late and not any(map(shape.follows_evaluation, unique.values())):
            last = _after_checkpoint(shape, shape.middle_first(late, shape.in_epoch)[0])
            unique[last.kill] = last
        return list(unique.values())
    chance = random.Random(seed)
    return [
        _of_one_rank(kill, chance, ranks) if chance.random() < alone else kill
        for kill in _at_random(shape, int(how), chance)
    ]


def _of_one_rank(chosen: ChosenKill, chance: random.Random, ranks: int) -> ChosenKill:
    rank = chance.randrange(ranks) if chosen.kill.place == "step" else 0  # the others may write nothing
    return replace(
        chosen, kill=replace(chosen.kill, rank=rank, target="rank"), text=f"{chosen.text}, rank {rank} alone"
    )


def _in_the_middle(shape: RunShape) -> ChosenKill:
    """Between a checkpoint in the middle of an epoch, if there is one, and the next, at least a step after it."""

    def place(after: int) -> int:
        end = shape.following(after)
        inside = range(after + 1, end) or range(after, after + 1)
        return min(inside, key=lambda step: (not shape.in_epoch(step), abs(2 * step - after - end)))

    best = shape.middle_first(
        shape.usable(), lambda after: place(after) > after, shape.in_epoch, lambda after: shape.in_epoch(place(after))
    )[0]
    return _before_step(place(best), best)


def _before_step(done: int, checkpoint: int) -> ChosenKill:
    text = f"before step {done + 1}, {plural(done - checkpoint, 'step')} after the checkpoint of step {checkpoint}"
    return ChosenKill(PlannedKill("step", done + 1), done, text)


def _after_checkpoint(shape: RunShape, after: int | None = None) -> ChosenKill:
    if after is None:
        after = shape.middle_first(shape.usable(), shape.in_epoch)[0]
    last = shape.checkpoints[after][-1]
    return ChosenKill(
        PlannedKill("checkpoint", last.number), after, f"right after the checkpoint of step {after} was written"
    )


def _end_of_epoch(shape: RunShape) -> ChosenKill | None:
    """At the end of an epoch, preferably with a checkpoint there."""
    first = shape.usable()[0]
    ends = [after for after in shape.epochs if first <= after < shape.steps]
    for after in shape.middle_first(ends, lambda after: after in shape.checkpoints)[:1]:
        checkpoint = max(other for other in shape.usable() if other <= after)
        text = f"at the end of an epoch, after step {after} (newest checkpoint: step {checkpoint})"
        return ChosenKill(PlannedKill("step", after + 1), after, text)
    return None


def _torn(shape: RunShape, after: int | None = None) -> ChosenKill | None:
    """While a checkpoint is written that is neither the first nor, if possible, the last one."""
    later = sorted(shape.checkpoints)[1:]
    if after is None and later:
        after = shape.middle_first(later[:-1] or later)[0]
    if after is None:
        return None
    largest = max(shape.checkpoints[after], key=lambda file: file.size)
    text = f"while the checkpoint of step {after} was being written ({largest.path.name})"
    return ChosenKill(PlannedKill("write", largest.write), after, text)


def _at_random(shape: RunShape, number: int, chance: random.Random) -> list[ChosenKill]:
    usable = shape.usable()
    before = range(usable[0] + 1, shape.steps)
    # A file that is still to be renamed is no checkpoint: after the first one, a resume would begin from scratch.
    is_early = bool(before) and shape.checkpoints[usable[0]][-1].is_moved
    pools: list[list[ChosenKill]] = [
        [_before_step(done, max(after for after in usable if after <= done)) for done in before],
        [_after_checkpoint(shape, after) for after in usable[is_early:]],
        [kill for after in sorted(shape.checkpoints)[1:] if (kill := _torn(shape, after))],
    ]
    late = [[*filter(shape.follows_evaluation, pool)] for pool in pools[:2]]
    first = late if any(late) else pools[:2]  # the first one is after a checkpoint
    pools += [[*shape.operations], [*shape.evaluations]]
    chosen: list[ChosenKill] = []
    while len(chosen) < number and any(pools):
        pool = chance.choice([pool for pool in (pools if chosen else first) if pool])
        chosen.append(chance.choice(pool))
        pools = [[each for each in pool if each != chosen[-1]] for pool in pools]
    return chosen
