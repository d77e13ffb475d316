"""The learning rate as a function of the applied updates, and of the evaluations for ``plateau``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from harness.config.schedule import ScheduleSection
from harness.errors import ConfigError, plural

_DECAYS: dict[str, Callable[[float], float]] = {  # progress from 0 to 1 -> share of the way that is left
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "sqrt": lambda progress: 1 - math.sqrt(progress),  # https://arxiv.org/abs/2405.18392
}


@dataclass
class Plateau:
    """The state of the schedule ``plateau``, derived from the evaluations; part of a checkpoint."""

    best: float | None = None
    num_bad: int = 0  # evaluations in a row without a better metric
    cooldown: int = 0  # evaluations that are left out
    reductions: int = 0

    def forget_best(self) -> None:
        """Make the next evaluation the best so far."""
        self.best, self.num_bad = None, 0


@dataclass(frozen=True)
class Schedule:
    """The learning rate, a pure function of the number of applied updates and of a plateau's reductions.

    ``floor`` is ``min_lr``, scaled as ``peak`` is.
    """

    section: ScheduleSection
    peak: float
    floor: float
    steps_per_epoch: int
    total_steps: int

    @cached_property
    def warmup_steps(self) -> int:
        return self.section.warmup_steps or round(self.section.warmup_epochs * self.steps_per_epoch)

    @cached_property
    def _decay_steps(self) -> int:
        return round(self.section.decay_ratio * self.total_steps) if self.section.name == "wsd" else 0

    def require_fit(self, num_updates: int) -> None:
        """Raise ConfigError if the warm-up is longer than the ``num_updates`` of all epochs, or meets the decay."""
        warmup, decay = self.warmup_steps, self._decay_steps
        if warmup + decay > num_updates:
            parts = f"a warm-up of {plural(warmup, 'update')}" + (f" and a decay of {decay}" if decay else "")
            raise ConfigError(
                f"{parts} take longer than the {plural(num_updates, 'update')} of the run" if decay else
                f"{parts} is longer than the run of {num_updates}",
                where="schedule.warmup_steps" if self.section.warmup_steps else "schedule.warmup_epochs",
                hint="shorten the warm-up, or raise train.epochs",
            )  # fmt: skip

    def lr(self, applied: int, reductions: int = 0) -> float:
        """The learning rate of the update after ``applied`` others and ``reductions`` of a plateau."""
        section, warmup = self.section, self.warmup_steps
        if section.name == "one_cycle":
            start = self.peak / section.div_factor
            return self._cycle(applied, start, self.peak, start / section.final_div_factor)
        if applied < warmup:
            return self.peak * (applied + 1) / warmup
        if section.name == "step":
            passed = sum(applied >= round(epoch * self.steps_per_epoch) for epoch in section.milestones)
            return self.peak * section.gamma**passed
        if section.name == "plateau":
            return max(self.peak * section.factor**reductions, self.floor) if reductions else self.peak
        return self.floor + (self.peak - self.floor) * self._left(applied - warmup, self.total_steps - warmup)

    def _left(self, step: int, total: int) -> float:
        """The share of the way from the peak to the floor that is left at ``step`` of ``total`` after the warm-up."""
        section, progress = self.section, min(1.0, step / max(1, total))
        if section.name == "cosine":  # https://arxiv.org/abs/1608.03983, one period
            return _DECAYS["cosine"](progress)
        if section.name == "cosine_restarts":  # and with restarts
            length = max(1, round((section.cycle_epochs or 1.0) * self.steps_per_epoch))
            while section.cycle_mult > 1 and step >= length:
                step, length = step - length, length * section.cycle_mult
            step %= length
            return _DECAYS["cosine"](step / length)
        if section.name == "polynomial":
            return float((1 - progress) ** section.power)
        if section.name == "wsd":  # https://arxiv.org/abs/2404.06395
            decay = max(1, min(self._decay_steps, total))
            return _DECAYS[section.decay_type](min(1.0, max(0, step - (total - decay)) / decay))
        return 1.0

    def momentum(self, applied: int) -> float | None:
        """The momentum of the update after ``applied`` others; None if the schedule leaves it alone."""
        section = self.section
        if section.name != "one_cycle" or not section.cycle_momentum:
            return None
        return self._cycle(applied, section.max_momentum, section.base_momentum, section.max_momentum)

    def _cycle(self, applied: int, start: float, middle: float, end: float) -> float:
        """Two half cosines, https://arxiv.org/abs/1708.07120, whose turning points are those of torch's OneCycleLR."""
        turn, last = self.section.pct_start * self.total_steps - 1, self.total_steps - 1
        phases = [(0.0, start), (turn, middle), (last, end)]
        for (begins, before), (ends, after) in pairwise(phases):
            if applied <= ends and ends > begins:
                return after + (before - after) * _DECAYS["cosine"]((applied - begins) / (ends - begins))
        return end

    def set_lr(self, optimizer: torch.optim.Optimizer, applied: int, reductions: int = 0) -> float:
        """Set the learning rate of each group, and the momentum; return the rate of the parameters without a group of
        their own."""
        lr, momentum = self.lr(applied, reductions), self.momentum(applied)
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
        if self.momentum(0) is not None and not group.keys() & {"betas", "momentum"}:
            raise ConfigError(
                f"one_cycle changes the momentum, but {type(optimizer).__name__} has none",
                where="schedule.cycle_momentum",
                hint="set schedule.cycle_momentum=false, or use an optimizer with momentum or betas, such as sgd",
            )

    def evaluated(self, plateau: Plateau, value: float, increases: bool, applied: int) -> bool:
        """Add the metric of an evaluation, equal on all ranks, to ``plateau``; True if that lowered the learning rate.

        As torch's ReduceLROnPlateau, with a relative threshold. Evaluations during the warm-up are left out.
        """
        section = self.section
        if section.name != "plateau" or applied < self.warmup_steps:
            return False
        if _better(value, plateau.best, increases, section.threshold):
            plateau.best, plateau.num_bad = value, 0
        else:
            plateau.num_bad += 1
        if plateau.cooldown:
            plateau.cooldown, plateau.num_bad = plateau.cooldown - 1, 0
        if plateau.num_bad <= section.patience:
            return False
        before = self.lr(applied, plateau.reductions)
        plateau.num_bad, plateau.cooldown, plateau.reductions = 0, section.cooldown, plateau.reductions + 1
        return self.lr(applied, plateau.reductions) < before

    def described(self) -> str:
        """The learning rate at the start, at its peak and at the end, for the log and ``harness check``."""
        section, total = self.section, self.total_steps
        if section.name == "constant" and not self.warmup_steps:
            return "constant"
        peak = next(step for step in range(total) if step + 1 == total or self.lr(step + 1) <= self.lr(step))
        points = [f"{self.lr(0):.3g} at the start"]
        points += [f"{self.lr(peak):.3g} at the peak (update {peak + 1})"] if peak else []
        points += [f"{self.lr(total - 1):.3g} at the end (update {total})"] if section.name != "plateau" else [
            f"multiplied by {section.factor:g} after {plural(section.patience + 1, 'evaluation')} without improvement"
        ]  # fmt: skip
        return f"{section.name}, {', '.join(points)}"


def _better(value: float, best: float | None, increases: bool, threshold: float) -> bool:
    """As in torch, whose best value is infinite at first. A NaN is never better."""
    best = (-math.inf if increases else math.inf) if best is None else best
    return value > best * (1 + threshold) if increases else value < best * (1 - threshold)
