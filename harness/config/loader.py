"""Load a configuration: a YAML file and ``key=value`` overrides in, a validated Config out; and back to text.

Three layers are checked in order: the syntax of the files (``merge``), the schema, the constraints between settings.
A layer that fails ends the check, with all of its errors at once: file and line, key, and the nearest spelling.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError, create_model

from harness.config import plugins, schedules
from harness.config.constraints import Conflict, conflicts
from harness.config.launch import LaunchSection, section_class
from harness.config.merge import merged, origin_of
from harness.config.recipe import code_names
from harness.config.schema import Config, ScheduleSection, TaskSection
from harness.config.seals import sealed_text
from harness.config.sentences import Problem, described, not_finite
from harness.config.trees import flatten, has
from harness.errors import OVERRIDES, ConfigError, HarnessError, OwnCodeError, plural

Content = TypeVar("Content", bound=BaseModel)
_ORIGINS = "_origins"  # the attribute of a Config with the places of its keys
_IN_FOLDER = "the folder of the configuration has it: run the command in {0}, or set PYTHONPATH={0}"


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    written_at: Mapping[str, str] | str | None = None,
    *,
    launching: bool = False,
) -> Config:
    """Return the validated configuration of ``path`` with ``overrides`` ("a.b=c") on top.

    Relative paths of data stay relative to the working folder. ``written_at``: where overrides are that do not come
    from the command line, all or as {dotted key: "file:line"}. ``launching``: import an engine of the user's own, and
    check its settings. Raises ConfigError.
    """
    raw, origins = merged(Path(path), overrides, written_at or {})
    if "task" not in raw and {"base", "space"} <= raw.keys():
        raise ConfigError("this is a sweep file", where=str(path), hint=f"harness sweep -c {path}")
    cls, problems, own_errors = _class_and_problems(raw, launching, Path(path).parent)
    if any(key == "task.name" for key, _ in problems):
        raw = {**raw, "task": {"name": "unknown.task"}}
    config, value_problems = _validated(cls, raw)
    problems += value_problems
    if config is not None and not problems:
        problems = [_as_problem(conflict) for conflict in conflicts(config)] + [*_beside(config, Path(path).parent)]
    if config is None or problems:
        raise own_errors[0] if len(problems) == len(own_errors) == 1 else _error(problems, origins, str(path))
    vars(config)[_ORIGINS] = {**origins, "": str(path)}  # beside the fields: not compared and not written
    return config


def placed(error: HarnessError, config: Config) -> HarnessError:
    """Return ``error``, with the place where ``config`` sets what it is about, if it names that: by the key, or by a
    file that is missing. Only building the parts of a run finds such errors."""
    origins, tree = vars(config).get(_ORIGINS, {}), as_tree(config)
    match = re.match(r"[\w.]+(?=$|: |=)", error.where)
    key = match[0] if match and has(tree, match[0]) else ""
    if error.where and not key and not os.path.exists(error.where):
        key = next((each for each, value in flatten(tree).items() if value == error.where), "")
        error.where = f"{key}: {error.where}" if key else error.where
    if key and (position := origin_of(key, origins, origins.get("", ""))):
        error.where = f"{position}: {error.where}"
        error.hint = f"{error.hint}{_of_other_name(key, origins)}".removeprefix("; ")
    return error


def _beside(config: Config, folder: Path) -> Iterator[Problem]:
    """Yield the tables of the task and the user's own modules that are in ``folder``, that of the configuration, and
    not in the working folder."""
    for key, value in flatten({"task": config.task.model_dump(mode="json")}).items():
        is_table = isinstance(value, str) and value.endswith((".csv", ".csv.gz", ".parquet"))
        if is_table and not Path(value).exists() and (folder / value).is_file():
            problem = f"{value} is looked for in the working folder, but is in that of the configuration"
            yield key, f"{problem}\n     -> run the command in {folder}, or set {key}={folder / value}"
    for key, name in code_names(as_tree(config)):
        if _in_folder(name, folder):
            yield key, f"there is no module {name} in the working folder\n     -> {_IN_FOLDER.format(folder)}"


def _in_folder(name: str, folder: Path) -> bool:
    """Return True if ``folder`` has the first part of the dotted ``name``, a module or a package, and Python would not
    find it."""
    first = name.partition(".")[0]
    if not first.isidentifier() or not ((folder / f"{first}.py").is_file() or any((folder / first).glob("*.py"))):
        return False
    return first not in sys.modules and importlib.util.find_spec(first) is None


def load_as(
    cls: type[Content],
    path: str | Path,
    overrides: Sequence[str],
    conflicts_of: Callable[[Content], Iterable[Conflict]],
) -> tuple[Content, dict[str, str]]:
    """Return a YAML file of another kind, such as a sweep, checked in the same layers; and the origins of its keys."""
    raw, origins = merged(Path(path), overrides, {})
    if "task" in raw and "base" not in raw:
        message = "this is the configuration of a run; a sweep file has base: and space:"
        raise ConfigError(message, where=str(path), hint=f"harness train -c {path}")
    content, problems = _validated(cls, raw)
    if content is not None and not problems:
        problems = [_as_problem(conflict) for conflict in conflicts_of(content)]
    if content is None or problems:
        raise _error(problems, origins, str(path))
    return content, origins


def _validated(cls: type[Content], raw: Any) -> tuple[Content | None, list[Problem]]:
    """Return (``raw`` as ``cls`` if possible, the problems)."""
    problems = not_finite(raw)
    try:
        return cls.model_validate(raw), problems
    except ValidationError as errors:
        known = dict(problems)
        return None, problems + [problem for problem in described(errors, cls, raw) if problem[0] not in known]


def to_text(config: Config) -> str:
    """Return the resolved configuration as YAML with a seal, itself a valid configuration file."""
    return sealed_text(yaml.dump(as_tree(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True))


class _Dumper(yaml.SafeDumper):
    """Also quotes the texts that OmegaConf, unlike PyYAML, would read as numbers, such as 1e3."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        quoted = text in ("y", "Y", "n", "N")
        with suppress(ValueError):
            float(text)
            quoted = True
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="'" if quoted else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def as_tree(config: Config) -> dict[str, Any]:
    """Return the resolved configuration as plain dictionaries, with the keys of the YAML."""
    return config.model_dump(mode="json", by_alias=True)


def config_class(task: Any, schedule: Any = None, launch: type[LaunchSection] | None = None) -> type[Config]:
    """Return Config with these sections: ``task``, a TaskSection; ``schedule``, by default the constant one; and
    ``launch``, by default that of the engine local."""
    return _config_class_of(task, schedule or schedule_class(None), launch or section_class(None, launching=False))


@functools.cache  # so that two configurations of the same parts have the same class and can be compared
def _config_class_of(task: Any, schedule: Any, launch: type[LaunchSection]) -> type[Config]:
    def optional(key: str, kind: Any, default: Any) -> Any:
        return kind, Field(default_factory=default, description=Config.model_fields[key].description)

    return create_model(
        "Config", __base__=Config, __doc__="One experiment.", task=(task, ...),
        schedule=optional("schedule", schedule, schedule_class(None)), launch=optional("launch", launch, launch),
    )  # fmt: skip


def _class_and_problems(
    raw: dict[str, Any], launching: bool, folder: Path
) -> tuple[type[Config], list[Problem], list[OwnCodeError]]:
    """Return Config with the sections of the task, the schedule and the engines that ``raw``, in ``folder``, names; the
    reasons where there is none; and those of them that are errors in the user's own code."""
    problems, own = list[Problem](), list[OwnCodeError]()

    def found(key: str, make: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return make(*arguments)
        except (ConfigError, OwnCodeError) as error:
            lacks = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
            beside = lacks is not None and _in_folder(lacks, folder)
            error.hint = _IN_FOLDER.format(folder) if beside else error.hint
            what = error.message
            if isinstance(error, OwnCodeError):
                own.append(error)
                what = f"{error.where}: {what}"
            problems.append((key, f"{what}; {error.hint}" if error.hint else what))

    task = found("task.name", _task_class, raw.get("task"))
    schedule = found("schedule.name", schedule_class, raw.get("schedule"))
    launch = found("launch.engine", section_class, raw.get("launch"), launching)
    return config_class(task or TaskSection, schedule or ScheduleSection, launch), problems, own


def schedule_class(raw: Any) -> type[ScheduleSection]:
    """Return ScheduleSection with the arguments of the schedule that ``raw`` names. Raises ConfigError."""
    name = raw.get("name", "constant") if isinstance(raw, dict) else "constant"
    if not isinstance(name, str):
        return ScheduleSection  # which reports the type
    return schedules.section(name)


def _task_class(raw: Any) -> type[TaskSection]:
    """Return the class Task of the task that ``raw`` names. Raises ConfigError."""
    if ":" in str(raw) and not isinstance(raw, dict):
        raise ConfigError(
            f"it should be a section, {{key: value}} (found: {raw!r})", hint="write a space after a colon"
        )
    name = raw.get("name") if isinstance(raw, dict) else None
    if not isinstance(name, str):
        hint = f"use one of {', '.join(plugins.names('task'))}"
        raise ConfigError("required, but not set", hint=hint)
    found = plugins.find("task", name, "task.name")
    if not (isinstance(found, type) and issubclass(found, TaskSection)):
        what = f"Task of {name} is not a subclass of harness.config.schema.TaskSection"
        raise ConfigError(what, hint="docs/add_a_task.md has an example")
    return found


def _as_problem(conflict: Conflict) -> Problem:
    return conflict.key, f"{conflict.message}\n     -> {conflict.hint}"


def _error(problems: Sequence[Problem], origins: dict[str, str], path: str) -> ConfigError:
    places = [f"{origin_of(key, origins, path)}: {key}" for key, _ in problems]
    if len(places) == 1 and places[0].startswith(f"{OVERRIDES}: "):
        message, _, hint = problems[0][1].partition("\n     -> ")
        return ConfigError(message, where=places[0], hint=hint)
    lines = [
        f"  {position}: {sentence}{_of_other_name(key, origins) if sentence.startswith('unknown key') else ''}"
        for position, (key, sentence) in zip(places, problems, strict=True)
    ]
    return ConfigError(f"{plural(len(lines), 'problem')} in the configuration\n" + "\n".join(lines), where=path)


def _of_other_name(key: str, origins: dict[str, str]) -> str:
    """Return how to drop the arguments around ``key``, if a file has them and an override, or another file, the name
    of what they are for."""
    section, args, _ = key.partition(".args.")
    file, named_in = (origin_of(each, origins, "").rpartition(":")[0] for each in (key, f"{section}.name"))
    return f"; to drop those of {file}, set {section}.args=null" if args and file not in ("", named_in) else ""
