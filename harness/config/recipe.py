"""The recipe of a run, which is the settings that change what is trained; and what the ranks of a run must share."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, get_args

from harness.config import plugins
from harness.config.base import Mark, Section
from harness.config.schema import Config, TaskSection
from harness.config.trees import differences, flatten


def in_recipe(key: str, task: object) -> bool:
    """Return True if the setting ``key`` of a run of the task ``task.name`` changes what is trained."""
    return not _has(Mark.NO_RECIPE, key, task)


def may_differ_between_ranks(key: str, task: object) -> bool:
    return _has(Mark.OF_MACHINE, key, task)


def _has(mark: Mark, key: str, task: object) -> bool:
    above = accumulate(key.split("."), "{}.{}".format)  # such as runtime and runtime.device
    return not _marked(mark, _section(str(task))).isdisjoint(above)


def _section(task: str) -> type[Section]:
    """Return the options of a task. No code of the user's is imported: without its module, a task has no marks."""
    if "." not in task:
        return _built_in(task)
    package, _, attribute = task.rpartition(".")
    places = (sys.modules.get(task), "Task"), (sys.modules.get(package), attribute)
    found = [getattr(module, name, None) for module, name in places]
    return next((each for each in found if isinstance(each, type) and issubclass(each, TaskSection)), TaskSection)


@functools.cache
def _built_in(task: str) -> type[Section]:
    known = task in plugins.names("task")
    return plugins.find("task", task, "task.name") if known else TaskSection  # type: ignore[no-any-return]


@functools.cache
def _marked(mark: Mark, task: type[Section]) -> frozenset[str]:
    return frozenset([*_keys(mark, Config, ""), *_keys(mark, task, "task.")])


def _keys(mark: Mark, section: type[Section], prefix: str) -> Iterator[str]:
    """Yield the dotted keys of the settings and sections with ``mark``."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        kinds = (field.annotation, *get_args(field.annotation))  # such as Annotated[str, mark] | None
        if mark in (*field.metadata, *(each for kind in kinds for each in getattr(kind, "__metadata__", ()))):
            yield key
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from _keys(mark, kind, f"{key}.")


def recipe_difference(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {key: (before, now)} of the settings, in two resolved configurations, that change what is trained."""
    one, other = flatten(before), flatten(now)
    found = differences(one, other)
    return {key: pair for key, pair in found.items() if in_recipe(key, other.get("task.name"))}
