"""Look up the parts that a YAML file names, such as tasks, models and checkpoint formats. Verbs follow this rule.

A name without a dot is built in: ``KINDS`` says in which folder, and docs/architecture.md how to add one. A name with a
dot is a part of the user's own, importable from the working folder: ``package.module``, which holds the same as a
built-in file, or ``package.module.Class``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_type_hints

from harness.config import spelling
from harness.errors import ConfigError, either, first_line, of_part, readable, users_line

_HARNESS = Path(__file__).parents[1]


class Kind(NamedTuple):
    """The place of the built-in parts of one kind."""

    folder: str
    holds: str | None = None
    """The name to take from a module; None: the module is the part."""
    entry: str | None = None
    """The module to import where the part is a folder; None: it never is."""
    helpers: frozenset[str] = frozenset()
    """Modules of the folder that are not parts, besides ``base``."""
    base: tuple[str, str] | None = None
    """The module and the name of the base class of all parts, if they need to have one."""
    files: bool = True
    """A part may be a single file."""


KINDS = {
    "task": Kind("tasks", "Task", "config"),
    "model": Kind("training/model/built_in", "Model"),
    "model library": Kind("training/model/libraries"),
    "strategy": Kind(
        "training/strategies",
        "Strategy",
        helpers=frozenset({"sharding"}),
        base=("harness.training.strategies.base", "ParallelStrategy"),
    ),
    "tracker": Kind("trackers", "Tracker", helpers=frozenset({"forwarder", "metrics_log", "pictures"})),
    "format": Kind("runs/formats", "Format", base=("harness.runs.formats.base", "Format")),
    "export format": Kind("inference/formats", "Format", base=("harness.inference.formats.base", "ExportFormat")),
    "engine": Kind("engines", entry="engine", files=False),
    "engine settings": Kind("engines", "Settings", "settings", files=False),
}


def names(kind: str) -> list[str]:
    """Return the built-in parts of ``kind``, sorted. Lists a folder; imports nothing."""
    place = KINDS[kind]
    folder, found = _HARNESS / place.folder, set[str]()
    if place.files:
        found |= {path.stem for path in folder.glob("[!_]*.py")}
    if place.entry:
        found |= {path.parent.name for path in folder.glob(f"*/{place.entry}.py")}
    return sorted(found - place.helpers - {"base"})


def require(kind: str, name: str, where: str) -> None:
    """Raise ConfigError at ``where`` if ``name`` is neither built in nor the user's own. Imports nothing."""
    if "." not in name and name not in names(kind):
        raise unknown(kind, name, names(kind), where)


def find(kind: str, name: str, where: str) -> Any:
    """Return the part ``name`` of ``kind``, imported: a class or a module.

    Raises ConfigError at ``where``, the key that names the part, if there is none, OwnCodeError if its code fails.
    """
    place = KINDS[kind]
    if "." in name:
        part = import_own(kind, name, where, place.holds)
        if place.base is not None:
            module_name, base_name = place.base
            if not makes(part, getattr(importlib.import_module(module_name), base_name)):
                raise wrong_kind(name, f"{module_name}.{base_name}", where)
        return part
    require(kind, name, where)
    package = ".".join(["harness", *place.folder.split("/"), name])
    # A folder without this file is what git leaves: one with __pycache__.
    in_folder = place.entry and (_HARNESS / place.folder / name / f"{place.entry}.py").is_file()
    module = importlib.import_module(f"{package}.{place.entry}" if in_folder else package)
    return getattr(module, place.holds) if place.holds else module


def import_own(kind: str, name: str, where: str, holds: str | None = None) -> Any:
    """Return the user's own part: ``package.module.Class``, or ``holds`` of ``package.module`` (the module if
    None)."""
    try:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            package, _, attribute = name.rpartition(".")
            return getattr(importlib.import_module(package), attribute)
        return getattr(module, holds) if holds else module
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's module may raise anything, and may call sys.exit
        hint = "" if users_line(error) else "write package.module or package.module.Class, importable from here"
        hint = spelling.import_hint(name, error, holds) or hint
        found = f"{type(error).__name__}: {first_line(readable(error))}"
        raise of_part(f"the {kind} {name!r} cannot be imported ({found})", error, where, hint) from error


def makes(part: Any, base: type) -> bool:
    """Return True if ``part`` is a subclass of ``base``, or a function whose annotation says that it returns one.

    Check this before ``part`` is called: a configuration may name any function, such as ``os.system``.
    """
    if inspect.isclass(part):
        return issubclass(part, base)
    returns = {"return": getattr(part, "__annotations__", {}).get("return")} if inspect.isroutine(part) else {}
    try:
        found = get_type_hints(
            SimpleNamespace(__annotations__=returns), getattr(inspect.unwrap(part), "__globals__", {})
        )
    except Exception:  # an annotation may be any text
        return False
    return inspect.isclass(found.get("return")) and issubclass(found["return"], base)


def wrong_kind(name: str, base: str, where: str) -> ConfigError:
    """Return the error for a part that is not a ``base``, such as torch.nn.Module, and is therefore not called."""
    return ConfigError(
        f"{name} is not a {base}",
        where=where,
        hint=f"use a subclass of it, or a function that is annotated to return one: def make(...) -> {base}",
    )


def unknown(kind: str, name: str, known: Iterable[str], where: str, otherwise: str = "") -> ConfigError:
    """Return the error for a name that is not built in, with the user's module of that name; if there is none, with the
    nearest spellings; or with ``otherwise`` as hint, or the known names."""
    known = sorted(known)
    near = spelling.nearest(name.lower(), known)
    holds = KINDS[kind].holds if kind in KINDS else "Class"
    own = "package.module or module.Class" if holds else "package.module"
    otherwise = otherwise or f"use one of {', '.join(known)}, or your own {own}"
    hint = spelling.own_module(kind, name, holds) or (f"did you mean {either(near)}?" if near else otherwise)
    return ConfigError(f"unknown {kind} {name!r}", where=where, hint=hint)
