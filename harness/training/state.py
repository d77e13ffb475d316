"""The position of a run, which its checkpoints keep, and whether training is over there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.config.schema import Config
from harness.data.shards import Segment
from harness.errors import plural
from harness.training.measuring.meter import Window
from harness.training.optimizer.schedule import Plateau


@dataclass
class State:
    """Counters of a run, equal on every rank except the times. Epochs and steps count once they are finished; only
    ``segments`` has the present step already. Rows, losses and ``train_s`` count up to the last log line."""

    epoch: int = 0
    # The steps of this epoch so far: how many, by how many ranks, with how many rows of each.
    segments: list[Segment] = field(default_factory=list)
    epoch_applied: int = 0  # steps of this epoch that changed the weights
    epoch_skipped: int = 0
    epoch_rows: int = 0  # the rows of the applied steps, over all ranks
    epoch_loss: float = 0.0  # the sum of the losses of these rows
    step: int = 0  # optimizer steps, including skipped ones
    applied: int = 0  # those that changed the weights; the schedule counts these
    skipped: int = 0
    skipped_in_a_row: int = 0
    rows: int = 0  # training rows over all ranks, including those of skipped steps
    rows_skipped: int = 0
    bad_rows: int = 0  # unreadable images, over all ranks
    history: list[dict[str, float]] = field(default_factory=list)  # one entry per evaluation
    evaluated: int = 0  # the step of the last evaluation
    best: float | None = None
    best_step: int = 0
    plateau: Plateau = field(default_factory=Plateau)  # how often ``schedule: plateau`` has lowered the learning rate
    wall_s: float = 0.0
    train_s: float = 0.0  # the part of ``wall_s`` spent in training, on this rank
    ended: str = ""  # why a hook, or a loop of the user's own, has ended training

    def add_step(self, skipped: bool) -> None:
        self.step += 1
        if skipped:
            self.skipped += 1
            self.epoch_skipped += 1
            self.skipped_in_a_row += 1
        else:
            self.applied += 1
            self.epoch_applied += 1
            self.skipped_in_a_row = 0

    def add_window(self, window: Window) -> None:
        """Count what was measured between two log lines, and reduced over all ranks."""
        self.rows += window.rows
        self.rows_skipped += window.rows_skipped
        self.bad_rows += window.bad
        self.epoch_rows += window.rows - window.rows_skipped
        self.epoch_loss += window.total
        self.train_s += window.time_s

    def add_evaluation(self, metrics: Mapping[str, float], name: str, increases: bool) -> bool:
        """Record the evaluation at this step; return True if its metric ``name`` is the best so far."""
        self.evaluated = self.step
        self.history.append({"step": self.step, "epoch": self.epoch, **metrics})
        value, best = metrics[name], self.best
        better = math.isfinite(value) and (best is None or (value > best if increases else value < best))
        if better:
            self.best, self.best_step = value, self.step
        return better

    def forget_evaluations(self) -> None:
        """Make the next evaluation the first, and so the best so far; train on if a hook had ended it."""
        self.ended = ""
        self.history, self.best, self.best_step = [], None, 0
        self.plateau.forget_best()

    def next_epoch(self) -> None:
        self.epoch, self.segments = self.epoch + 1, []
        self.epoch_applied = self.epoch_skipped = self.epoch_rows = 0
        self.epoch_loss = 0.0

    @property
    def in_epoch(self) -> bool:
        """True if steps of the epoch are taken, and it has not ended."""
        return bool(self.segments)

    def to_dict(self) -> dict[str, Any]:
        nested = {"segments": [asdict(segment) for segment in self.segments], "plateau": asdict(self.plateau)}
        return {**vars(self), **nested, "history": [dict(line) for line in self.history]}  # asdict takes 10 us a line

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> State:
        segments = [Segment(**segment) for segment in values["segments"]]
        return cls(**{**values, "segments": segments, "plateau": Plateau(**values["plateau"])})


def is_over(config: Config, state: State) -> bool:
    """Return True if training is over in ``state``, by epochs, steps, patience or a hook."""
    limits = (state.epoch, config.train.epochs), (state.step, config.train.max_steps)
    return any(limit and count >= limit for count, limit in limits) or bool(why_ended_early(config, state))


def why_ended_early(config: Config, state: State) -> str:
    """Return why training is over in ``state`` before its last epoch or step; empty if it is not."""
    name, delta, patience = config.best_metric, config.train.min_delta, config.train.patience
    if state.ended or patience is None:
        return state.ended
    sign = 1 if config.task.metrics[name] == "max" else -1
    since = _since_gain([sign * line[name] for line in state.history], delta)
    margin = f" by more than {delta:g}" if delta else ""
    reason = f"{name} was not better{margin} in the last {plural(since, 'evaluation')} (train.patience)"
    return reason if since >= patience else ""


def _since_gain(values: Sequence[float], delta: float) -> int:
    """Return the number of ``values`` after the last gain: one that is more than ``delta`` above the gain before."""
    last_gain, last_gain_at = -math.inf, 0
    for number, value in enumerate(values, 1):
        if math.isfinite(value) and value > last_gain + delta:
            last_gain, last_gain_at = value, number
    return len(values) - last_gain_at
