"""The built-in schedules, one function each.

A schedule returns the learning rate at a ``Point`` of the training, or the pair (learning rate, momentum). Its further
parameters are its settings, ``schedule.args``. Every public function of this module is a schedule by its name. Torch is
not imported: the arguments are checked with the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from harness.config.base import Conflict, Positive
from harness.config.duration import Bare, Duration
from harness.config.schema import Config
from harness.errors import plural
from harness.training.optimizer.schedule import Plateau, Schedule

Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
AtLeast1 = Annotated[float, Field(ge=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=0)]
Rule = TypeVar("Rule", bound=Callable[..., Any])


@dataclass(frozen=True)
class Point:
    """The next update of a run, for which a schedule returns the learning rate."""

    lr: float
    """``optimizer.lr``, before ``optimizer.lr_scaling``, which also applies to what the schedule returns."""
    applied: int
    """Updates so far, without steps that the loss scaler skipped."""
    warmup: int
    """Updates of the warm-up, during which a schedule is not called."""
    total: int
    """Updates of the whole run, if no step is skipped; ``applied`` exceeds it if a run is extended."""
    steps_per_epoch: int
    reductions: int = 0
    """How often the evaluations have lowered the rate of ``plateau``."""

    @property
    def update(self) -> int:
        """Updates since the warm-up."""
        return self.applied - self.warmup

    @property
    def num_updates(self) -> int:
        """Updates of the run after the warm-up, at least 1."""
        return max(1, self.total - self.warmup)

    @property
    def progress(self) -> float:
        """From 0 at the end of the warm-up to 1 at the end of the run."""
        return min(1.0, self.update / self.num_updates)


def _refusing(conflicts: Callable[[Config], Iterator[Conflict]]) -> Callable[[Rule], Rule]:
    """Give a schedule its ``conflicts``: the settings that contradict it, as a strategy has."""

    def mark(rule: Rule) -> Rule:
        vars(rule)["conflicts"] = conflicts
        return rule

    return mark


def constant(at: Point) -> float:
    """The learning rate stays."""
    return at.lr


def cosine(at: Point, *, min_lr: AtLeast0 = 0.0) -> float:
    """Half a cosine down to min_lr: https://arxiv.org/abs/1608.03983, one period."""
    return min_lr + (at.lr - min_lr) * _half_cosine(at.progress)


def cosine_restarts(at: Point, *, cycle_epochs: Above0, cycle_mult: Positive = 1, min_lr: AtLeast0 = 0.0) -> float:
    """Half cosines down to min_lr, the first of cycle_epochs, such as 10, each cycle_mult times as long as the one
    before."""
    step, length = at.update, max(1, round(cycle_epochs * at.steps_per_epoch))
    while cycle_mult > 1 and step >= length:
        step, length = step - length, length * cycle_mult
    return min_lr + (at.lr - min_lr) * _half_cosine(step % length / length)


def _conflicts_of_one_cycle(config: Config) -> Iterator[Conflict]:
    if config.schedule.warmup:
        yield Conflict(
            "schedule.warmup",
            "one_cycle has a warm-up of its own",
            "set this one to null, and use schedule.args.pct_start, the share of all updates in which one_cycle rises",
        )
    args, momentum = dict(config.schedule.args), config.optimizer.momentum
    if args["cycle_momentum"] and momentum is not None:
        yield Conflict(
            "optimizer.momentum",
            f"one_cycle varies the momentum from {args['max_momentum']} to {args['base_momentum']} and back, so "
            f"{momentum} would not be used",
            "use optimizer.momentum=null, or schedule.args.cycle_momentum=false",
        )


@_refusing(_conflicts_of_one_cycle)
def one_cycle(
    at: Point,
    *,
    pct_start: Share = 0.3,
    div_factor: AtLeast1 = 25.0,
    final_div_factor: AtLeast1 = 1e4,
    cycle_momentum: bool = True,
    base_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.85,
    max_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95,
) -> float | tuple[float, float]:
    """Up from optimizer.lr / div_factor in the share pct_start of all updates, then down to that / final_div_factor.
    The momentum (beta1 of Adam) falls from max_momentum to base_momentum and rises again.

    Two half cosines, https://arxiv.org/abs/1708.07120, whose turning points are those of torch's OneCycleLR.
    """
    turn, last = pct_start * at.total - 1, at.total - 1

    def between(start: float, middle: float, end: float) -> float:
        phases = [(0.0, start), (turn, middle), (last, end)]
        for (begins, before), (ends, after) in pairwise(phases):
            if at.applied <= ends and ends > begins:
                return after + (before - after) * _half_cosine((at.applied - begins) / (ends - begins))
        return end

    start = at.lr / div_factor
    lr = between(start, at.lr, start / final_div_factor)
    return (lr, between(max_momentum, base_momentum, max_momentum)) if cycle_momentum else lr


def _conflicts_of_plateau(config: Config) -> Iterator[Conflict]:
    patience, ours = config.train.patience, dict(config.schedule.args)["patience"]
    if patience and patience <= ours:
        yield Conflict(
            "schedule.args.patience",
            f"the run stops after {plural(patience, 'evaluation')} without a better metric, but the learning rate "
            f"would fall only after {ours + 1}",
            f"raise train.patience to {ours + 2} or more, or lower schedule.args.patience",
        )


@_refusing(_conflicts_of_plateau)
def plateau(
    at: Point,
    *,
    factor: Share = 0.1,
    patience: Count = 10,
    threshold: Annotated[float, Field(ge=0, lt=1)] = 1e-4,
    cooldown: Count = 0,
    min_lr: AtLeast0 = 0.0,
) -> float:
    """The learning rate is multiplied by factor, down to min_lr, after more than patience evaluations in a row whose
    checkpoint.best_metric is not better than the best by the share threshold. After each reduction, cooldown
    evaluations are ignored.

    ``Plateau`` counts.
    """
    return max(at.lr * factor**at.reductions, min_lr) if at.reductions else at.lr


def polynomial(at: Point, *, power: Above0 = 1.0, min_lr: AtLeast0 = 0.0) -> float:
    """Down to min_lr; with power 1, a straight line."""
    return float(min_lr + (at.lr - min_lr) * (1 - at.progress) ** power)


def _increasing(milestones: tuple[Duration, ...]) -> tuple[Duration, ...]:
    amounts = [each.amount for each in milestones]
    if not milestones or amounts != sorted(set(amounts)) or len({each.unit for each in milestones}) > 1:
        found = [each.written for each in milestones]
        raise ValueError(f"it should be epochs that increase, such as [30, 60], or steps (found: {found})")
    return milestones


def step(
    at: Point,
    *,
    milestones: Annotated[
        tuple[Annotated[Duration, Bare("epochs")], ...], Field(strict=False), AfterValidator(_increasing)
    ],
    gamma: Share = 0.1,
) -> float:
    """The learning rate is multiplied by gamma at each of the milestones, in epochs, such as [30, 60], or each in
    steps, "500 steps"."""
    return at.lr * gamma ** sum(at.applied >= each.steps(at.steps_per_epoch) for each in milestones)


def wsd(
    at: Point,
    *,
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1,
    decay_type: Literal["linear", "cosine", "sqrt"] = "linear",
    min_lr: AtLeast0 = 0.0,
) -> float:
    """Warm-up, stable, decay: constant, then down to min_lr in the share decay_ratio of the updates after the warm-up.
    sqrt is 1 - sqrt(progress): https://arxiv.org/abs/2405.18392. https://arxiv.org/abs/2404.06395
    """
    length = max(1, round(decay_ratio * at.num_updates))
    progress = min(1.0, max(0, at.update - (at.num_updates - length)) / length)
    if decay_type == "cosine":
        left = _half_cosine(progress)
    else:
        left = 1 - (progress if decay_type == "linear" else math.sqrt(progress))
    return min_lr + (at.lr - min_lr) * left


def _half_cosine(progress: float) -> float:
    """Return 1 to 0 while ``progress`` goes from 0 to 1."""
    return (1 + math.cos(math.pi * progress)) / 2


class BuiltInSchedule(Schedule):
    """A function of this module, which is pure."""

    def _at(self, applied: int, reductions: int) -> tuple[float, float | None]:
        found = self._function(
            Point(self.base, applied, self.warmup_steps, self.total_steps, self.steps_per_epoch, reductions),
            **self._args,
        )
        return found if isinstance(found, tuple) else (found, None)

    def after_evaluation(self, plateau: Plateau, value: float, increases: bool, applied: int) -> bool:
        if self.section.name != "plateau" or applied < self.warmup_steps:
            return False
        before, args = self.lr(applied, plateau.reductions), self._args
        plateau.add(value, increases, args["threshold"], args["patience"], args["cooldown"])
        return self.lr(applied, plateau.reductions) < before

    def describe(self) -> str:
        return "constant" if self.section.name == "constant" and not self.warmup_steps else super().describe()

    def _described_end(self, last: int) -> str:
        if self.section.name != "plateau":
            return super()._described_end(last)
        evaluations = plural(self._args["patience"] + 1, "evaluation")
        return f"multiplied by {self._args['factor']:g} after {evaluations} without improvement"
