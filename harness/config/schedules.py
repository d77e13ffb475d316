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
    found = plugins.import_own("schedule", name, _KEY)
    if _makes_scheduler(found):
        if inspect.isclass(found):
            require_no_metric(found, name)
        return Found(found, (*list(inspect.signature(found).parameters)[:1], "last_epoch"), True)
    if not inspect.isfunction(found):
        raise ConfigError(
            f"the schedule {name!r} is neither a function nor a torch LRScheduler",
            where=_KEY,
            hint="write package.module.NAME, importable from the working folder",
        )
    parameters = inspect.signature(found).parameters.values()
    passed = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)][:2]
    if len(passed) < 2:
        raise ConfigError(
            f"the schedule {name!r} takes {len(passed)} positional arguments, not two",
            where=_KEY,
            hint="define it as def schedule(update, total, *, ...), which returns a factor of optimizer.lr; annotate a "
            "function that makes an LRScheduler: def make(optimizer, ...) -> LRScheduler",
        )
    return Found(found, tuple(passed))


def section(name: str) -> type[ScheduleSection]:
    """Return ScheduleSection with the arguments of the schedule ``name``. Raises ConfigError."""
    function, passed, makes_scheduler = find(name)
    made: type[ScheduleSection] = signatures.section_of(
        ScheduleSection, name, function, name == "constant", passed, TOTALS if makes_scheduler else ()
    )
    return made


def require_no_metric(scheduler: Any, name: str) -> None:
    """Raise ConfigError for a class or an object, such as ReduceLROnPlateau, whose ``step`` needs a metric."""
    parameters = list(inspect.signature(scheduler.step).parameters.values())
    needed = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if set(needed) - {"self"}:
        raise ConfigError(
            f"{name} needs {needed[-1]} at each step, but a schedule follows the updates",
            where=_KEY,
            hint="schedule.name=plateau is torch's ReduceLROnPlateau on checkpoint.best_metric",
        )


def _makes_scheduler(found: Any) -> bool:
    torch = sys.modules.get("torch")  # a module with a scheduler has imported it
    return torch is not None and plugins.makes(found, torch.optim.lr_scheduler.LRScheduler)
