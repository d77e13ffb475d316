"""Load a configuration: a YAML file and ``key=value`` overrides in, a validated Config out; and back to text.

Three layers are checked in order: the syntax of the files (``merge``), the schema, the constraints between settings.
A layer that fails ends the check, with all of its errors at once: file and line, key, and the nearest spelling.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, create_model

from harness.config import other_names, plugins, schedules, signatures
from harness.config.constraints import Conflict, conflicts
from harness.config.launch import LaunchSection, built_in, section_class, with_engines
from harness.config.merge import COMMAND_LINE, merged, origin_of
from harness.config.schema import Config, ScheduleSection, TaskSection, flatten
from harness.config.seals import sealed_text
from harness.errors import ConfigError, HarnessError

__all__ = [
    "COMMAND_LINE",
    "as_tree",
    "config_class",
    "json_schema",
    "load",
    "load_as",
    "placed",
    "schema_tree",
    "to_text",
]

Content = TypeVar("Content", bound=BaseModel)
Problem = tuple[str, str]  # dotted key, sentence
_ORIGINS = "_origins"  # the attribute of a Config with the places of its keys
_IN_FOLDER = "the folder of the configuration has it: run the command in {0}, or set PYTHONPATH={0}"
_RENAMED = {
    "tuple_type": "it should be a list",
    "list_type": "it should be a list",
    "string_type": "it should be text; put it in quotes if necessary",
    "invalid_key": "keys must be text; put this key in quotes",
}


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    written_at: Mapping[str, str] | None = None,
    *,
    launching: bool = False,
) -> Config:
    """Return the validated configuration of ``path`` with ``overrides`` ("a.b=c") on top.

    Relative paths of data stay relative to the working folder. ``written_at`` is {dotted key: "file:line"} for
    overrides that do not come from the command line. ``launching``: import an engine of the user's own, and check its
    settings. Raises ConfigError.
    """
    raw, origins = merged(Path(path), overrides, written_at or {})
    cls, problems = _config_class(raw, launching, Path(path).parent)
    if any(key == "task.name" for key, _ in problems):
        raw = {**raw, "task": {"name": "unknown.task"}}
    config, found = _validated(cls, raw)
    problems += found
    if config is not None and not problems:
        problems = [_as_problem(conflict) for conflict in conflicts(config)] + [*_beside(config, Path(path).parent)]
    if config is None or problems:
        raise _error(problems, origins, str(path))
    vars(config)[_ORIGINS] = {**origins, "": str(path)}  # beside the fields: not compared and not written
    return config


def placed(error: HarnessError, config: Config) -> HarnessError:
    """Return ``error``, with the place where ``config`` sets what it is about, if it names that: by the key, or by a
    file that is missing. Only building the parts of a run finds such errors."""
    origins, tree = vars(config).get(_ORIGINS, {}), as_tree(config)
    named = re.match(r"[\w.]+(?=$|: |=)", error.where)
    key = named[0] if named and _has(tree, named[0]) else ""
    if error.where and not key and not os.path.exists(error.where):
        key = next((each for each, value in flatten(tree).items() if value == error.where), "")
        error.where = f"{key}: {error.where}" if key else error.where
    if key and (place := origin_of(key, origins, origins.get("", ""))):
        error.where = f"{place}: {error.where}"
    return error


def _has(tree: Any, key: str) -> bool:
    """Return True if ``tree`` has the dotted ``key``, in which numbers are places in lists."""
    for part in key.split("."):
        tree = {str(place): item for place, item in enumerate(tree)} if isinstance(tree, list) else tree
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def _beside(config: Config, folder: Path) -> Iterator[Problem]:
    """Yield the tables of the task and the user's own modules that are in ``folder``, that of the configuration, and
    not in the working folder."""
    for key, value in flatten({"task": config.task.model_dump(mode="json")}).items():
        is_table = isinstance(value, str) and value.endswith((".csv", ".csv.gz", ".parquet"))
        if is_table and not Path(value).exists() and (folder / value).is_file():
            what = f"{value} is looked for in the working folder, but is in that of the configuration"
            yield key, f"{what}\n     -> run the command in {folder}, or set {key}={folder / value}"
    for key, value in flatten(as_tree(config)).items():
        if key.endswith((".name", ".on_gradients")) and "." in str(value) and _in_folder(str(value), folder):
            yield key, f"there is no module {value} in the working folder\n     -> {_IN_FOLDER.format(folder)}"


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
    content, problems = _validated(cls, raw)
    if content is not None and not problems:
        problems = [_as_problem(conflict) for conflict in conflicts_of(content)]
    if content is None or problems:
        raise _error(problems, origins, str(path))
    return content, origins


def _validated(cls: type[Content], raw: Any) -> tuple[Content | None, list[Problem]]:
    """Return (``raw`` as ``cls`` if possible, the problems)."""
    problems = _not_finite(raw)
    try:
        return cls.model_validate(raw), problems
    except ValidationError as errors:
        known = dict(problems)
        return None, problems + [problem for problem in _described(errors, cls, raw) if problem[0] not in known]


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


def json_schema() -> str:
    """JSON Schema of an experiment with any built-in task, for editors and ``configs/schema.json``."""
    return json.dumps(schema_tree(), indent=1, sort_keys=True) + "\n"


def schema_tree() -> dict[str, Any]:
    """Return ``json_schema`` as dictionaries, with the settings in the order of their classes."""
    shapes = tuple(schedules.section(name) for name in signatures.functions(schedules.BUILT_IN))
    tasks = tuple(plugins.find("task", name, "task.name") for name in plugins.names("task"))
    engines = with_engines(**built_in())
    cls = config_class(Union[tasks], Union[shapes], engines)  # noqa: UP007 - unions made at run time
    schema = cls.model_json_schema(by_alias=True)
    schema["title"] = "apex-harness experiment"
    for key, base in (
        ("task", TaskSection),
        ("schedule", ScheduleSection),
    ):  # the user's own may have any
        name = {"pattern": r"\.", "description": base.model_fields["name"].description}
        own = {"properties": {"name": name}, "required": ["name"], "type": "object"}
        schema["properties"][key]["description"] = Config.model_fields[key].description
        schema["properties"][key]["anyOf"].append(own)
    settings = "Settings of an engine of your own, under the last word of its name."
    schema["$defs"][engines.__name__]["additionalProperties"] = {"type": "object", "description": settings}
    schema["properties"]["extends"] = {
        "description": "A YAML file or a preset, such as preset:modern, or a list of them, that this file starts from. "
        "Paths are relative to this file.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    schema["required"] = []  # a file that extends another, or that is extended, may be incomplete
    return schema


def config_class(task: Any, schedule: Any = None, launch: type[LaunchSection] | None = None) -> type[Config]:
    """Config with ``task``, a TaskSection, as its section ``task``, ``schedule``: by default the constant one, and
    ``launch``: by default that of the engine local."""
    return _config_class_of(task, schedule or schedule_class(None), launch or section_class(None, launching=False))


@functools.cache  # so that two configurations of the same parts have the same class and can be compared
def _config_class_of(task: Any, schedule: Any, launch: type[LaunchSection]) -> type[Config]:
    def optional(key: str, kind: Any, default: Any) -> Any:
        return kind, Field(default_factory=default, description=Config.model_fields[key].description)

    return create_model(
        "Config", __base__=Config, __doc__="One experiment.", task=(task, ...),
        schedule=optional("schedule", schedule, schedule_class(None)), launch=optional("launch", launch, launch),
    )  # fmt: skip


def _config_class(raw: dict[str, Any], launching: bool, folder: Path) -> tuple[type[Config], list[Problem]]:
    """Config with the sections of the task, the schedule and the engines that ``raw``, in ``folder``, names, and the
    reasons where there is none."""
    problems: list[Problem] = []

    def found(key: str, make: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return make(*arguments)
        except ConfigError as error:
            lacks = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
            beside = lacks is not None and _in_folder(lacks, folder)
            problems.append((key, f"{error.message}; {_IN_FOLDER.format(folder) if beside else error.hint}"))

    task = found("task.name", _task_class, raw.get("task"))
    schedule = found("schedule.name", schedule_class, raw.get("schedule"))
    launch = found("launch.engine", section_class, raw.get("launch"), launching)
    return config_class(task or TaskSection, schedule or ScheduleSection, launch), problems


def schedule_class(raw: Any) -> type[ScheduleSection]:
    """ScheduleSection with the arguments of the schedule that ``raw`` names. Raises ConfigError."""
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
    return conflict.keys[0], f"{conflict.message}\n     -> {conflict.hint}"


def _error(problems: Sequence[Problem], origins: dict[str, str], path: str) -> ConfigError:
    lines = [f"  {origin_of(key, origins, path)}: {key}: {sentence}" for key, sentence in problems]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigError(f"{count} in the configuration\n" + "\n".join(lines), where=path)


# pydantic's errors as sentences: the key, the value found, what is allowed, and the nearest spelling


def _described(errors: ValidationError, cls: type[BaseModel], raw: Any) -> list[Problem]:
    """One problem per key. The errors of the branches of a union are joined into one sentence."""
    found: dict[str, str] = {}
    for error in errors.errors(include_url=False):
        path = _path(error["loc"], raw)
        key, sentence = ".".join(path), _sentence(error, path, cls)
        found[key] = f"{found[key]}; or {sentence}" if key in found else sentence
    return list(found.items())


def _not_finite(tree: Any, key: str = "") -> list[Problem]:
    """One problem per number in ``tree``, at any depth, that is infinite, NaN or too large for a float."""
    if isinstance(tree, dict):
        return [
            problem
            for name, value in tree.items()
            for problem in _not_finite(value, f"{key}.{name}" if key else str(name))
        ]
    if isinstance(tree, list | tuple):
        return [problem for place, value in enumerate(tree) for problem in _not_finite(value, f"{key}.{place}")]
    if isinstance(tree, float) and math.isfinite(tree) or not isinstance(tree, int | float) or abs(tree) < 2**1023:
        return []
    return [
        (key, f"it should be a finite number (found: {tree if isinstance(tree, float) else 'more than 300 digits'})")
    ]


def _keys(cls: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a model, each section before its keys."""
    found: list[str] = []
    for name, field in cls.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        found.append(key)
        for inner in (field.annotation, *get_args(field.annotation)):
            kind = get_args(inner)[0] if get_origin(inner) is Annotated else inner
            if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
                found += _keys(kind, f"{key}.")
    return found


def _sentence(error: Any, path: list[str], cls: type[BaseModel]) -> str:
    seen, kind, context = error["input"], error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key; {_nearest(path, cls)}"
    if kind == "missing":
        return "required, but not set"
    if "expected" in context and kind == "literal_error":
        allowed = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        near = difflib.get_close_matches(str(seen), allowed, n=1)
        return f"{seen!r} is not allowed; use {context['expected']}" + (f"; did you mean {near[0]}?" if near else "")
    if kind == "value_error":  # raised by a validator of ours
        return str(error["msg"]).removeprefix("Value error, ")
    shown = repr(seen) if len(repr(seen)) <= 200 else f"{repr(seen)[:200]}..."
    if kind in ("model_type", "dict_type"):
        return f"it should be a section of settings, {{key: value}} (found: {shown})"
    unit = f"; {other_names.UNITS[path[-1]]}" if kind.startswith("int_") and path[-1] in other_names.UNITS else ""
    return f"{_RENAMED.get(kind) or error['msg'].replace('Input should', 'it should')} (found: {shown}){unit}"


def _path(loc: Iterable[Any], raw: Any) -> list[str]:
    """Return ``loc`` as keys of ``raw``, without the parts with which pydantic names a branch of a union."""
    path: list[str] = []
    node, last = raw, list(loc)[-1]
    for part in loc:
        if isinstance(node, dict) and (part in node or part in (last, "args")):  # args that are left out are checked
            path.append(str(part))
            node = node.get(part) or {}
        elif isinstance(node, list) and isinstance(part, int):
            path.append(str(part))
            node = node[part] if part < len(node) else None
    return path


def _nearest(path: list[str], cls: type[BaseModel]) -> str:
    """Return the nearest spelling of an unknown key: in its own section first, then anywhere."""
    if ":" in path[-1]:
        return "write a space after the colon"
    known = _keys(cls)
    ours = other_names.setting(".".join(path))
    if ours and any(f"{ours.partition('=')[0]}.".startswith(f"{key}.") for key in known):
        return str(other_names.hint(".".join(path)))
    prefix = "".join(f"{part}." for part in path[:-1])
    section = re.sub(r"\.\d+\.", ".", prefix)  # of a list
    siblings = [key[len(section) :] for key in known if key.startswith(section) and "." not in key[len(section) :]]
    if near := difflib.get_close_matches(path[-1], siblings, n=1):
        return f"did you mean {prefix}{near[0]}?"
    last = {key.rsplit(".", 1)[-1]: key for key in known}
    if near := difflib.get_close_matches(path[-1], last, n=1, cutoff=0.8):
        return f"did you mean {last[near[0]]}?"
    return "known keys: " + ", ".join(siblings)
