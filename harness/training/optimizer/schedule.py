"""What applies a learning-rate schedule to an optimizer, whether it is built in or the user's own.

``built_in_schedule.py`` and ``own_schedule.py`` say what the learning rate is after the warm-up. Torch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from harness.config import schedules
from harness.config.schema import ScheduleSection
from harness.errors import ConfigError, plural

if TYPE_CHECKING:
    import torch


@dataclass
class Plateau:
    """The state of the schedule ``plateau``, derived from the evaluations; part of a checkpoint."""

    best: float | None = None
    num_bad: int = 0
    """Evaluations in a row without a better metric."""
    cooldown: int = 0
    """Evaluations that are left out."""
    reductions: int = 0

    def add(self, value: float, increases: bool, threshold: float, patience: int, cooldown: int) -> None:
        """Add the metric of an evaluation, equal on all ranks, as torch's ReduceLROnPlateau with a relative threshold:
        count a reduction after more than ``patience`` bad ones."""
        if _better(value, self.best, increases, threshold):
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1
        if self.cooldown:
            self.cooldown, self.num_bad = self.cooldown - 1, 0
        if self.num_bad > patience:
            self.num_bad, self.cooldown, self.reductions = 0, cooldown, self.reductions + 1

    def forget_best(self) -> None:
        """Make the next evaluation the best so far."""
        self.best, self.num_bad = None, 0


@dataclass(frozen=True)
class Schedule:
    """The learning rate by the number of applied updates and of a plateau's reductions, after a linear warm-up.

    ``base`` is ``optimizer.lr``, and ``scale`` the factor of ``optimizer.lr_scaling``.
    """

    section: ScheduleSection
    base: float
    scale: float
    steps_per_epoch: int
    total_steps: int

    @cached_property
    def _function(self) -> Callable[..., float | tuple[float, float]]:
        return schedules.find(self.section.name).function

    @cached_property
    def _args(self) -> dict[str, Any]:
        return dict(self.section.args)

    @cached_property
    def warmup_steps(self) -> int:
        warmup = self.section.warmup
        return warmup.steps(self.steps_per_epoch, self.total_steps) if warmup else 0

    def require_fit(self, num_updates: int) -> None:
        """Raise ConfigError if the warm-up is longer than the ``num_updates`` of all epochs."""
        if self.warmup_steps > num_updates:
            raise ConfigError(
                f"a warm-up of {plural(self.warmup_steps, 'update')} is longer than the run of {num_updates}",
                where="schedule.warmup",
                hint="shorten the warm-up, or raise train.epochs",
            )

    def require_call(self) -> None:
        """Raise ConfigError if a schedule of the user's own fails."""

    def lr(self, applied: int, reductions: int = 0) -> float:
        """Return the learning rate of the update after ``applied`` others and ``reductions`` of a plateau."""
        return self._settings(applied, reductions)[0]

    def momentum(self, applied: int) -> float | None:
        """Return the momentum of the update after ``applied`` others; None if the schedule leaves it alone."""
        return self._settings(applied)[1]

    def _settings(self, applied: int, reductions: int = 0) -> tuple[float, float | None]:
        """Return ``lr`` and ``momentum``."""
        if applied < self.warmup_steps:
            return self.base * self.scale * (applied + 1) / self.warmup_steps, None
        rate, momentum = self._at(applied, reductions)
        return rate * self.scale, momentum

    def _at(self, applied: int, reductions: int) -> tuple[float, float | None]:
        """Return the learning rate, before ``scale``, and ``momentum`` of an update after the warm-up."""
        raise NotImplementedError

    def set_lr(self, optimizer: torch.optim.Optimizer, applied: int, reductions: int = 0) -> float:
        """Set the learning rate of each group, and the momentum; return the rate of the parameters without a group of
        their own."""
        lr, momentum = self._settings(applied, reductions)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
            if momentum is not None:
                if "betas" in group:
                    group["betas"] = (momentum, *group["betas"][1:])
                else:
                    group["momentum"] = momentum
        return lr

    def require_momentum(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ConfigError if the schedule changes a momentum that ``optimizer`` does not have."""
        group = optimizer.param_groups[0]
        if self.momentum(self.warmup_steps) is not None and not group.keys() & {"betas", "momentum"}:
            raise ConfigError(
                f"{self.section.name} changes the momentum, but {type(optimizer).__name__} has none",
                where="schedule.name",
                hint="use an optimizer with momentum or betas, such as sgd; or, with one_cycle, "
                "schedule.args.cycle_momentum=false",
            )

    def after_evaluation(self, plateau: Plateau, value: float, increases: bool, applied: int) -> bool:
        """Add the metric of an evaluation after the warm-up to ``plateau``; return True if that lowered the rate."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to continue the schedule, apart from the number of applied updates."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. One of another schedule is not used."""

    @property
    def num_foreseen(self) -> int:
        """The updates whose learning rates are known before the run."""
        return self.total_steps

    def foreseen(self, applied: int) -> float:
        """Return ``lr`` without a change of the state of the schedule."""
        return self.lr(applied)

    def describe(self) -> str:
        """Return the learning rate at the start, at its peak and at the end, for the log and ``harness check``."""
        last = self.num_foreseen - 1
        peak = next(at for at in range(last + 1) if at == last or self.foreseen(at + 1) <= self.foreseen(at))
        points = [f"{self.foreseen(0):.3g} at the start"]
        points += [f"{self.foreseen(peak):.3g} at the peak (update {peak + 1})"] if peak else []
        return f"{self.section.name}, {', '.join([*points, self._described_end(last)])}"

    def _described_end(self, last: int) -> str:
        end = "at the end" if last + 1 == self.total_steps else "later"
        return f"{self.foreseen(last):.3g} {end} (update {last + 1})"


def _better(value: float, best: float | None, increases: bool, threshold: float) -> bool:
    """Return True if ``value`` is better than ``best`` as torch compares, whose best value is infinite at first. A NaN
    is never better."""
    best = (-math.inf if increases else math.inf) if best is None else best
    return value > best * (1 + threshold) if increases else value < best * (1 - threshold)
