"""From a YAML file and ``key=value`` overrides to a validated Config, and back to text.

OmegaConf loads, merges (``extends:``), interpolates and parses overrides; pydantic validates. Every problem of a file
is found in one pass and told in one ConfigError: where it is written, the key, and the nearest right spelling.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError, create_model

from harness.config import plugins
from harness.config.constraints import Conflict, conflicts
from harness.config.schema import Config, TaskSection, flatten
from harness.errors import ConfigError, first_line

COMMAND_LINE = "command line"
Problem = tuple[str, str]  # where it is written, what is wrong
Content = TypeVar("Content", bound=BaseModel)


def load(path: str | Path, overrides: Sequence[str] = (), said: Mapping[str, str] | None = None) -> Config:
    """The validated configuration of ``path`` with ``overrides`` ("a.b=c") on top.

    Raises ConfigError listing all problems at once. Relative data paths stay relative to the working folder. ``said``
    tells where overrides are written, {dotted key: "file:line"}, if not on the command line.
    """
    raw, origins = _resolved(Path(path), overrides, said or {})
    return _validate(raw, origins, str(path))


def load_as(
    cls: type[Content],
    path: str | Path,
    overrides: Sequence[str],
    conflicts_of: Callable[[Content], Iterable[Conflict]],
) -> tuple[Content, dict[str, str]]:
    """A file of another kind than an experiment, such as a sweep, read and refused in the same manner; and where each
    of its dotted keys is written."""
    raw, origins = _resolved(Path(path), overrides, {})
    try:
        content = cls.model_validate(raw)
    except ValidationError as errors:
        problems = list(_described(errors, cls, raw).items())
    else:
        problems = [_as_problem(conflict) for conflict in conflicts_of(content)]
        if not problems:
            return content, origins
    raise _refusal(problems, origins, str(path))


def _resolved(path: Path, overrides: Sequence[str], said: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
    """The tree of ``path`` with ``overrides``, interpolated, and where each dotted key was written last."""
    tree, origins = _read(path, ())
    for override in overrides:
        key, separator, _ = override.partition("=")
        if not separator or not key or key.startswith("-"):
            raise ConfigError(
                f"{override!r} is not an override",
                where=COMMAND_LINE,
                hint="write key=value, for example train.epochs=3",
            )
        try:
            written = OmegaConf.from_dotlist([override])
            tree = OmegaConf.merge(tree, written)
        except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{override!r}: {first_line(error)}",
                where=said.get(key, COMMAND_LINE),
                hint="write key=value, for example train.epochs=3",
            ) from None
        leaves = flatten(OmegaConf.to_container(written))  # type: ignore[arg-type]
        origins |= dict.fromkeys((key, *leaves), said.get(key, COMMAND_LINE))
    try:
        raw: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        raise ConfigError(f"{key}: {first_line(error)}", where=_origin(key, origins, str(path))) from None
    return raw, origins


def to_text(config: Config) -> str:
    """The resolved configuration as YAML, itself a valid configuration file."""
    return yaml.dump(as_tree(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def json_schema() -> str:
    """JSON Schema of a configuration file with any of the tasks there are, for editors and ``configs/schema.json``."""
    tasks = tuple(_task_section(name) for name in task_names())
    schema = _with_task(Union[tasks]).model_json_schema(by_alias=True)  # noqa: UP007 - a union made at run time
    schema["title"] = "apex-harness experiment"
    foreign = {"properties": {"name": {"pattern": r"\."}}, "required": ["name"], "type": "object"}
    schema["properties"]["task"]["anyOf"].append(foreign)  # its options are not known here
    schema["properties"]["extends"] = {
        "description": "A YAML file, or several, that this one starts from; paths relative to this file.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    schema["required"] = []  # a file that is extended, or extends one, need not be complete
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


def task_names() -> list[str]:
    """The tasks there are: the files of harness/tasks."""
    return plugins.names("tasks")


def _task_section(name: str) -> type[TaskSection]:
    section: type[TaskSection] = plugins.load("tasks", name).Task
    return section


def _foreign_section(name: str) -> type[TaskSection] | str:
    """``Task`` of a module that is not ours, by its dotted name; or why there is none."""
    try:
        section = importlib.import_module(name).Task
    except Exception as error:  # a user's module, which may fail in any way
        reason = f"{type(error).__name__}: {first_line(error)}"
        return f"{name!r} cannot be imported ({reason}); write package.module, importable from the working folder"
    if not (isinstance(section, type) and issubclass(section, TaskSection)):
        return f"Task of {name} is not a harness.config.schema.TaskSection; docs/add_a_task.md shows one that is"
    return section


@functools.cache  # two configurations of one task are of one class, and can be compared
def _with_task(task: Any) -> type[Config]:
    return create_model("Config", __base__=Config, __doc__="One experiment.", task=(task, ...))


# Reading


def _read(path: Path, parents: tuple[Path, ...]) -> tuple[Any, dict[str, str]]:
    """The merged tree of ``path`` and what it extends, and where each dotted key was written last."""
    if path.resolve() in parents:
        chain = " -> ".join(p.name for p in (*parents, path))
        raise ConfigError(f"extends goes in a circle: {chain}", where=str(path), hint="remove one of the extends lines")
    try:
        text = path.read_text(encoding="utf-8")
        tree: Any = OmegaConf.create(text)
        origins = _lines(text, path)
    except (OSError, UnicodeDecodeError) as error:
        near = difflib.get_close_matches(
            path.name, [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        )
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        hint = f"did you mean {path.parent / near[0]}?" if near else "name a YAML file, for example configs/digits.yaml"
        raise ConfigError(f"the configuration cannot be read: {reason}", where=str(path), hint=hint) from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(
            f"this is not YAML: {getattr(error, 'problem', None) or first_line(error)}", where=where
        ) from None
    if not OmegaConf.is_dict(tree):
        raise ConfigError(
            "a configuration is a mapping of sections",
            where=str(path),
            hint="start it with a line such as name: digits",
        )
    bases = OmegaConf.to_container(tree).get("extends") or []  # type: ignore[union-attr]
    tree.pop("extends", None)
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"extends names a file or a list of files (seen: {bases!r})",
            where=origins.get("extends", str(path)),
            hint="for example extends: base.yaml",
        )
    merged: Any = OmegaConf.create({})
    all_origins: dict[str, str] = {}
    for base in bases:
        base_tree, base_origins = _read(path.parent / base, (*parents, path.resolve()))
        merged, all_origins = OmegaConf.merge(merged, base_tree), all_origins | base_origins
    try:
        return OmegaConf.merge(merged, tree), all_origins | origins
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error), where=str(path)) from None


def _lines(text: str, path: Path) -> dict[str, str]:
    """{dotted key: "file:line"} of every key that ``text`` writes."""
    found: dict[str, str] = {}

    def walk(node: yaml.Node | None, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                found[f"{prefix}{key.value}"] = f"{path}:{key.start_mark.line + 1}"
                walk(value, f"{prefix}{key.value}.")

    walk(yaml.compose(text, Loader=yaml.SafeLoader), "")
    return found


def _origin(key: str, origins: dict[str, str], default: str) -> str:
    """Where ``key``, or the nearest section around it, or else a part of it, was written."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if found := origins.get(".".join(parts[:length])):
            return found
    return next((origin for part, origin in origins.items() if part.startswith(f"{key}.")), default)


# Validating


def _validate(raw: Any, origins: dict[str, str], path: str) -> Config:
    cls, problems = _config_class(raw)
    wrong = {key for key, _ in problems}
    while True:
        try:
            config = cls.model_validate(raw)
        except ValidationError as errors:
            # Report, take the bad keys out, and look again: what is left may hold conflicts worth telling at once.
            found = _described(errors, cls, raw)
            problems += [(key, message) for key, message in found.items() if key not in wrong]
            removed = [_remove(raw, error["loc"]) for error in errors.errors()]
            wrong |= found.keys()
            if not any(removed):  # only required keys are missing: stand something in for them
                if cls is Config and "task" in wrong:
                    break  # that was done, or a key is of a kind that cannot be taken out, such as a number
                cls, raw = Config, {"name": "unnamed", **raw, "task": {"name": "unknown"}}
                wrong.add("task")
        else:
            sections = {near for key in wrong for near in _sections_near(key.split(".")[0])}
            problems += [
                _as_problem(conflict)
                for conflict in conflicts(config)
                if not {key.split(".")[0] for key in conflict.keys} & sections
            ]
            break
    if not problems:
        return config
    raise _refusal(problems, origins, path)


def _refusal(problems: Sequence[Problem], origins: dict[str, str], path: str) -> ConfigError:
    lines = [f"  {_origin(key, origins, path)}: {key}: {message}" for key, message in problems]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigError(f"{count} in the configuration\n" + "\n".join(lines), where=path)


def _as_problem(conflict: Conflict) -> Problem:
    return conflict.keys[0], f"{conflict.message}\n     -> {conflict.hint}"


def _sections_near(name: str) -> list[str]:
    """``name``, or the section that it misspells, whose settings are then not known."""
    return [name] if name in Config.model_fields else difflib.get_close_matches(name, Config.model_fields, n=1)


def _config_class(raw: dict[str, Any]) -> tuple[type[Config], list[Problem]]:
    """The Config class with the section of the task that ``raw`` names."""
    task = raw.get("task")
    name = task.get("name") if isinstance(task, dict) else None
    names = task_names()
    if name in names:
        return _with_task(_task_section(name)), []
    if isinstance(name, str) and "." in name:
        section = _foreign_section(name)
        if not isinstance(section, str):
            return _with_task(section), []
        problem = section
    else:
        near = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the tasks are: {', '.join(names)}; or package.module of yours"
        seen = f"there is no task {name!r}" if name is not None else "which task? none is named"
        problem = f"{seen}; {hint}"
    raw["task"] = {"name": "unknown"}
    return Config, [("task.name", problem)]


def _described(errors: ValidationError, cls: type[BaseModel], raw: Any) -> dict[str, str]:
    """{dotted key: sentence}, one for all branches of a union."""
    found: dict[str, str] = {}
    for error in errors.errors(include_url=False):
        key, message = _describe(error, cls, raw)
        found[key] = f"{found[key]}; or {message}" if key in found else message
    return found


def _describe(error: Any, cls: type[BaseModel], raw: Any) -> Problem:
    """(dotted key, sentence) of one pydantic error."""
    loc = _path(error["loc"], raw)
    key, seen, kind = ".".join(loc), error["input"], error["type"]
    if kind == "extra_forbidden":
        return key, f"unknown key; {_nearest(loc, cls)}"
    if kind == "missing":
        return key, "needed, but not set"
    if kind in ("literal_error", "string_type") and "expected" in error.get("ctx", {}):
        allowed = error["ctx"]["expected"]
        near = difflib.get_close_matches(
            str(seen), [a.strip("'") for a in allowed.replace(" or ", ", ").split(", ")], n=1
        )
        return key, f"{seen!r} is not allowed; allowed: {allowed}" + (f"; did you mean {near[0]}?" if near else "")
    if kind == "value_error":
        return key, error["msg"].removeprefix("Value error, ")
    message = error["msg"].replace("Input should", "it should")
    return key, f"{message} (seen: {seen!r})"


def _path(loc: Iterable[Any], raw: Any) -> list[str]:
    """``loc`` without the parts that name a branch of a union instead of a key."""
    path: list[str] = []
    node, last = raw, list(loc)[-1]
    for part in loc:
        if isinstance(node, dict) and (part in node or part == last):
            path.append(str(part))
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int):
            path.append(str(part))
            node = node[part] if part < len(node) else None
    return path


def _nearest(loc: list[str], cls: type[BaseModel]) -> str:
    """The nearest spelling of the unknown key ``loc``, in its section first, then anywhere."""
    known = _keys(cls)
    prefix = "".join(f"{part}." for part in loc[:-1])
    siblings = [key[len(prefix) :] for key in known if key.startswith(prefix) and "." not in key[len(prefix) :]]
    if near := difflib.get_close_matches(loc[-1], siblings, n=1):
        return f"did you mean {prefix}{near[0]}?"
    last = {key.rsplit(".", 1)[-1]: key for key in known}
    if near := difflib.get_close_matches(loc[-1], last, n=1, cutoff=0.8):
        return f"did you mean {last[near[0]]}?"
    return "known here: " + ", ".join(siblings)


def _keys(cls: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a model, sections before what is in them."""
    keys: list[str] = []
    for name, field in cls.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        keys.append(key)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += _keys(kind, f"{key}.")
    return keys


def _remove(raw: Any, loc: Iterable[Any]) -> bool:
    """Take the value at ``loc`` out of ``raw``; False where there is none (a missing key)."""
    path = _path(loc, raw)
    node = raw
    for part in path[:-1]:
        node = node[int(part)] if isinstance(node, list) else node.get(part)
        if isinstance(node, list):
            break
    if isinstance(node, list):  # one bad element spoils the list
        return _remove(raw, path[: len(path) - 1])
    return isinstance(node, dict) and node.pop(path[-1], _MISSING) is not _MISSING


_MISSING = object()


class _Dumper(yaml.SafeDumper):
    """Quotes text that OmegaConf, unlike PyYAML, reads as a number, such as 1e5."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.[\d_]+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def as_tree(config: Config) -> dict[str, Any]:
    """The resolved configuration as plain dictionaries, keys as written in YAML."""
    return config.model_dump(mode="json", by_alias=True)
