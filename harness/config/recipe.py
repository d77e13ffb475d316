"""What the marks of the settings say: which change what is trained (the recipe of a run), which the ranks of a run must
share, and which name code."""

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


def may_name_code(key: str) -> bool:
    """Return True if the setting ``key`` of any built-in task may name code."""
    return any(_has(Mark.CODE, key, task) for task in plugins.names("task"))


def code_names(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, dotted name) of all code that a resolved configuration names."""
    for key in sorted(_marked(Mark.CODE, _section(settings["task"]["name"]))):
        node: Any = settings
        for part in key.split("."):
            node = (node or {}).get(part)
        yield from _dotted(key, node)


def _dotted(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from _dotted(f"{key}.{number}", each)
    elif isinstance(value, dict):  # a section, or {name of a transform: its arguments}
        yield from _dotted(f"{key}.name", value["name"]) if "name" in value else _dotted(key, next(iter(value)))
    elif isinstance(value, str) and "." in value and ":" not in value:  # not timm:NAME.TAG
        yield key, value


def _has(mark: Mark, key: str, task: object) -> bool:
    above = accumulate(key.split("."), "{}.{}".format)  # such as runtime and runtime.device
    return not _marked(mark, _section(str(task))).isdisjoint(above)


def _section(task: str) -> type[Section]:
    """Return the options of a task. No code of the user's is imported: without its module, a task has no marks."""
    if "." not in task:
        return _built_in(task)
    package, _, attribute = task.rpartition(".")
    places = (sys.modules.get(task), "Task"), (sys.modules.get(package), attribute)
    classes = [getattr(module, name, None) for module, name in places]
    return next((each for each in classes if isinstance(each, type) and issubclass(each, TaskSection)), TaskSection)


@functools.cache
def _built_in(task: str) -> type[Section]:
    is_built_in = task in plugins.names("task")
    return plugins.find("task", task, "task.name") if is_built_in else TaskSection  # type: ignore[no-any-return]


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
    settings_before, settings_now = flatten(before), flatten(now)
    changed = differences(settings_before, settings_now)
    return {key: pair for key, pair in changed.items() if in_recipe(key, settings_now.get("task.name"))}
