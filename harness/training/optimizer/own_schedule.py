"""Schedules of the user's own: a function of (update, total), or an LRScheduler of torch or of the user's.

Both see the updates after the warm-up only, and the learning rate before ``optimizer.lr_scaling`` and the ``lr_scale``
of a group, which multiply what they return.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from harness.config import schedules
from harness.config.schema import Config
from harness.errors import ConfigError, HarnessError, OwnCodeError, first_line, of_part, place_of
from harness.training.checkpoints.own_state import require_plain
from harness.training.optimizer import optimizer_builder
from harness.training.optimizer.built_in_schedule import BuiltInSchedule
from harness.training.optimizer.schedule import Schedule

_FORESEEN = 100_000  # updates whose rates are computed before the run, in about a second


def build(config: Config, scale: float, steps_per_epoch: int, total_steps: int) -> Schedule:
    """Return the schedule of ``config``: ``scale`` is the factor of ``optimizer.lr_scaling``."""
    section, base = config.schedule, config.optimizer.lr
    if "." not in section.name:
        return BuiltInSchedule(section, base, scale, steps_per_epoch, total_steps)
    if not schedules.find(section.name).makes_scheduler:
        return FunctionSchedule(section, base, scale, steps_per_epoch, total_steps)

    def optimizer() -> torch.optim.Optimizer:
        return optimizer_builder.build(config.optimizer, [nn.Parameter(torch.zeros(1))], base)

    return SchedulerSchedule(section, base, scale, steps_per_epoch, total_steps, optimizer)


class OwnSchedule(Schedule):
    """A schedule of the user's own, of which nothing is known but the rates that it returned."""

    @cached_property
    def _rates(self) -> list[float]:
        again: Schedule = replace(self)  # whose state is not that of the run
        return [again.lr(applied) for applied in range(self.num_foreseen)]

    @property
    def num_foreseen(self) -> int:
        return min(self.total_steps, _FORESEEN)

    def foreseen(self, applied: int) -> float:
        return self._rates[applied]

    def require_call(self) -> None:
        """Raise HarnessError if the schedule fails in the first 100,000 updates, or returns no learning rate."""
        _ = self._rates

    @property
    def _updates(self) -> int:
        """The updates of the run after the warm-up, at least 1."""
        return max(1, self.total_steps - self.warmup_steps)

    def _at(self, applied: int, reductions: int) -> tuple[float, float | None]:
        try:
            rate, momentum = self._after_warmup(applied - self.warmup_steps)
        except HarnessError:
            raise
        except Exception as error:  # of the user's own code
            what = f"the schedule {self.section.name} fails at update {applied + 1}: {type(error).__name__}"
            hint = f"the run has {self.total_steps} updates, and it was called for one after another"
            raise of_part(f"{what}: {first_line(error)}", error, "schedule", hint) from error
        if applied < self.total_steps and not (math.isfinite(rate) and rate >= 0):  # none is used after the last update
            what = f"the schedule {self.section.name} returns {rate / self.base:g} times optimizer.lr"
            hint = "return a finite factor of optimizer.lr that is not negative"
            raise ConfigError(f"{what} at update {applied + 1}", where="schedule.name", hint=hint)
        return rate, momentum

    def _after_warmup(self, update: int) -> tuple[float, float | None]:
        """Return the learning rate and the momentum after ``update`` updates since the warm-up."""
        raise NotImplementedError


class FunctionSchedule(OwnSchedule):
    """``function(update, total, **args)``, which returns the factor of ``optimizer.lr``."""

    def _after_warmup(self, update: int) -> tuple[float, float | None]:
        factor: Any = self._function(update, self._updates, **self._args)
        try:
            return float(self.base * factor), None
        except TypeError:
            number = update + self.warmup_steps + 1
            what = f"the schedule {self.section.name} returned {factor!r:.80} at update {number}"
            hint = "return a number, the factor of optimizer.lr, at every update"
            raise OwnCodeError(what, where=place_of(self._function) or "schedule.name", hint=hint) from None


@dataclass(frozen=True)
class SchedulerSchedule(OwnSchedule):
    """An LRScheduler, stepped once for each applied update. ``make_optimizer`` returns an optimizer with the settings
    of the run's, for one number: the scheduler changes only that, and what it sets is copied to the run's."""

    make_optimizer: Callable[[], torch.optim.Optimizer]

    @cached_property
    def _scheduler(self) -> _Stepped:
        return self._new()

    def _new(self) -> _Stepped:
        args = self._args
        given = {key: value for key, value in args.items() if value is not None or key not in schedules.TOTALS}
        if args.get("epochs") is None:  # of OneCycleLR, which then needs no total
            given |= {key: self._updates for key in schedules.TOTALS if key in args and key not in given}
        return _Stepped(self._function(self.make_optimizer(), **given), self.section.name)

    def _after_warmup(self, update: int) -> tuple[float, float | None]:
        if update < self._scheduler.updates:
            vars(self)["_scheduler"] = self._new()
        return self._scheduler.at(update)

    @property
    def _identity(self) -> list[Any]:
        """What has to be the same for a state to fit."""
        args = self.section.args
        shown = repr(args) if isinstance(args, dict) else args.model_dump_json()
        return [self.section.name, shown, self.base, self.warmup_steps, self.total_steps]

    def state_dict(self) -> dict[str, Any]:
        return {"of": self._identity, **self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. One of another schedule, or for a run of another length, is not used: the scheduler
        then starts anew, and takes all updates so far before the next one."""
        if state.get("of") == self._identity:
            self._scheduler.load_state_dict(state)


class _Stepped:
    """A torch ``scheduler``, and how many ``updates`` it was stepped."""

    def __init__(self, scheduler: Any, name: str) -> None:
        if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            what = f"{name} returns an object of type {type(scheduler).__name__}, not an LRScheduler"
            raise ConfigError(what, where="schedule.name", hint="return a torch.optim.lr_scheduler.LRScheduler from it")
        schedules.require_no_metric(scheduler, name)
        self.scheduler, self.name, self.updates = scheduler, name, 0
        self._optimizer: Any = scheduler.optimizer
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch warns that the optimizer has taken no step

    def at(self, update: int) -> tuple[float, float | None]:
        while self.updates < update:
            self.scheduler.step()
            self.updates += 1
        group = self._optimizer.param_groups[0]
        momentum = group["betas"][0] if "betas" in group else group.get("momentum")
        return float(group["lr"]), momentum if isinstance(momentum, float) else None

    def state_dict(self) -> dict[str, Any]:
        group = {key: value for key, value in self._optimizer.param_groups[0].items() if key != "params"}
        state = {"updates": self.updates, "scheduler": self.scheduler.state_dict(), "group": group}
        require_plain(state, f"the state of {self.name}", "schedule.name")
        return copy.deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state["scheduler"])
        self._optimizer.param_groups[0].update(state["group"])
        self.updates = state["updates"]
