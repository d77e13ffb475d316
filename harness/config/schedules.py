"""The schedules that a configuration may name: the built-in functions, the user's own, and torch's LRSchedulers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from harness.config import hugging_face_names, plugins, signatures
from harness.config.base import Conflict
from harness.config.schema import Config, ScheduleSection
from harness.config.signatures import Function
from harness.errors import ConfigError

BUILT_IN = "harness.training.optimizer.built_in_schedule"  # imported with a configuration, as the module of a task is
TOTALS = ("total_steps", "total_iters", "T_max")  # arguments of torch's classes: by default the updates of the run
_KEY = "schedule.name"


class Found(NamedTuple):
    """The schedule of a name: a function, or what makes an LRScheduler."""

    function: Function
    passed: tuple[str, ...]
    """The parameters that the harness passes."""
    makes_scheduler: bool = False

    def conflicts(self, config: Config) -> Iterable[Conflict]:
        """Return what the function's attribute ``conflicts``, if it has one, yields for ``config``."""
        found: Iterable[Conflict] = getattr(self.function, "conflicts", lambda _: ())(config)
        return found


def find(name: str) -> Found:
    """Return the schedule ``name``: a built-in function; ``package.module.function``, called with (update, total); or a
    subclass of LRScheduler, or a function annotated to return one. Raises ConfigError."""
    if ours := hugging_face_names.SCHEDULES.get(name):
        raise ConfigError(f"unknown schedule {name!r}", where=_KEY, hint=f"use {ours}")
    if "." not in name:
        function = signatures.find("schedule", name, _KEY, signatures.functions(BUILT_IN))
        return Found(function, tuple(inspect.signature(function).parameters)[:1])
    factory = plugins.import_own("schedule", name, _KEY)
    if _makes_scheduler(factory):
        if inspect.isclass(factory):
            require_no_metric(factory, name)
        return Found(factory, (*list(inspect.signature(factory).parameters)[:1], "last_epoch"), True)
    if not inspect.isfunction(factory):
        raise ConfigError(
            f"the schedule {name!r} is neither a function nor a torch LRScheduler",
            where=_KEY,
            hint="write package.module.NAME, importable from the working folder",
        )
    parameters = inspect.signature(factory).parameters.values()
    passed = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)][:2]
    if len(passed) < 2:
        raise ConfigError(
            f"the schedule {name!r} takes {len(passed)} positional arguments, not two",
            where=_KEY,
            hint="define it as def schedule(update, total, *, ...), which returns a factor of optimizer.lr; annotate a "
            "function that makes an LRScheduler: def make(optimizer, ...) -> LRScheduler",
        )
    return Found(factory, tuple(passed))


def section(name: str) -> type[ScheduleSection]:
    """Return ScheduleSection with the arguments of the schedule ``name``. Raises ConfigError."""
    function, passed, makes_scheduler = find(name)
    return signatures.section_of(
        ScheduleSection, name, function, name == "constant", passed, TOTALS if makes_scheduler else ()
    )


def require_no_metric(scheduler: Any, name: str) -> None:
    """Raise ConfigError for a class or an object, such as ReduceLROnPlateau, whose ``step`` needs a metric."""
    parameters = list(inspect.signature(scheduler.step).parameters.values())
    required = [
        each.name for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    if set(required) - {"self"}:
        raise ConfigError(
            f"{name} needs {required[-1]} at each step, but a schedule follows the updates",
            where=_KEY,
            hint="schedule.name=plateau is torch's ReduceLROnPlateau on checkpoint.best_metric",
        )


def _makes_scheduler(factory: Any) -> bool:
    torch = sys.modules.get("torch")  # a module with a scheduler has imported it
    return torch is not None and plugins.makes(factory, torch.optim.lr_scheduler.LRScheduler)
