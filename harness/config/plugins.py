"""Look up the parts that a YAML file names, such as tasks, models and checkpoint formats. Verbs follow this rule.

A name without a dot is built in. To build in another part, add one file (or folder); no list needs an edit:

    part       file, or module of a folder                        what it holds
    task       harness/tasks/NAME.py or NAME/config.py            class Task (harness.config.schema.TaskSection)
    model      harness/training/model/built_in/NAME.py            class Model (torch.nn.Module)
    library    harness/training/model/libraries/PREFIX.py         maker, arguments, published: models PREFIX:NAME
    optimizer  a class of torch.optim or harness.apex.optimizers
    strategy   harness/training/strategies/NAME.py                class Strategy (harness.training.strategies.base)
    tracker    harness/trackers/NAME.py                           class Tracker (harness.trackers.base)
    engine     harness/engines/NAME.py or NAME/engine.py          render, start, Settings (harness.engines.base)
    format     harness/runs/formats/NAME.py                       class Format (harness.runs.formats.base)
    export     harness/inference/formats/NAME.py                  class Format (harness.inference.formats.base)
    gradients  a function of the user's, with a dot               train.on_gradients (training/optimizer)
    hook       a class of the user's, with a dot                  after_step, ... (training/hooks.py)
    verb       command.py or VERB_command.py of a package         VERB, HELP, add_arguments, run (harness.cli)

A name with a dot is a part of the user's own, importable from the working folder: ``package.module``, which holds the
same as a built-in file, or ``package.module.Class``. tests/end_to_end/test_extend.py adds one of each.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_type_hints

from harness.errors import ConfigError, either, first_line, of_part, readable, similar, users_line

_HARNESS = Path(__file__).parents[1]


class Kind(NamedTuple):
    """The place of the built-in parts of one kind."""

    folder: str
    holds: str | None = None
    """The name to take from a module; None: the module is the part."""
    entry: str | None = None
    """The module to import where the part is a folder; None: it never is."""
    shared: frozenset[str] = frozenset()
    """Modules of the folder that are not parts."""
    base: tuple[str, str] | None = None
    """The module and the name of the base class of all parts, if they need to have one."""
    files: bool = True
    """A part may be a single file."""


KINDS = {
    "task": Kind("tasks", "Task", "config"),
    "model": Kind("training/model/built_in", "Model"),
    "model library": Kind("training/model/libraries", shared=frozenset({"base"})),
    "strategy": Kind(
        "training/strategies",
        "Strategy",
        shared=frozenset({"base", "sharding"}),
        base=("harness.training.strategies.base", "ParallelStrategy"),
    ),
    "tracker": Kind("trackers", "Tracker", shared=frozenset({"base", "forwarder", "metrics_log", "pictures"})),
    "format": Kind("runs/formats", "Format", shared=frozenset({"base"}), base=("harness.runs.formats.base", "Format")),
    "export format": Kind(
        "inference/formats",
        "Format",
        shared=frozenset({"base"}),
        base=("harness.inference.formats.base", "ExportFormat"),
    ),
    "engine": Kind("engines", entry="engine", shared=frozenset({"base", "command", "launch"})),
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
    return sorted(found - place.shared)


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
        hint = _nearest(name, error, holds) or hint
        found = f"{type(error).__name__}: {first_line(readable(error))}"
        raise of_part(f"the {kind} {name!r} cannot be imported ({found})", error, where, hint) from error


def _nearest(name: str, error: BaseException, holds: str | None) -> str:
    """Return a hint for the name of a file; or with the nearest name of the module that lacks ``name``, if that is why
    its import failed."""
    package, _, attribute = name.rpartition(".")
    first = name.partition(".")[0]
    own, other = Path(f"{first}.py").absolute(), getattr(sys.modules.get(first), "__file__", None) or "built in"
    if attribute != "py" and first in sys.modules and own.is_file() and own.resolve() != Path(other).resolve():
        return f"the module {first} that Python imports is {other}, not your {first}.py: rename yours"
    if attribute == "py":
        dotted = package.replace("/", ".").strip(".")
        dotted += "" if "." in dotted else f".{holds or 'Class'}"
        return f"write {dotted}, without .py and with dots between folders"
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        parent, _, missing = error.name.rpartition(".")
        near = similar(missing, _modules(parent))
        return f"did you mean {parent}{parent and '.'}{near}{name.removeprefix(error.name)}?" if near else ""
    if not (isinstance(error, AttributeError) and inspect.ismodule(error.obj) and error.name == attribute):
        return ""
    near = similar(attribute, [*vars(error.obj), *_modules(package)]) if error.obj.__name__ == package else None
    return f"did you mean {package}.{near}?" if near else ""


def _modules(package: str) -> list[str]:
    """Return the modules in ``package``, which is imported; in the working folder, if it is empty."""
    folders = getattr(sys.modules.get(package), "__path__", ()) if package else [str(Path.cwd())]
    return [module.name for module in pkgutil.iter_modules(folders)]


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
    near = _near(name.lower(), known)
    own = "package.module" if kind in KINDS and not KINDS[kind].holds else "package.module or module.Class"
    otherwise = otherwise or f"use one of {', '.join(known)}, or your own {own}"
    hint = _own_module(kind, name) or (f"did you mean {either(near)}?" if near else otherwise)
    return ConfigError(f"unknown {kind} {name!r}", where=where, hint=hint)


def _near(name: str, known: Iterable[str]) -> list[str]:
    """Return the up to three of ``known`` that are about as similar to ``name`` as the most similar one; or
    the one that ``name`` is with an addition, as in adamw_torch."""
    known = list(known)
    if (first := name.partition("_")[0]) in known and name.replace("_", "") not in known:
        return [first]
    found = difflib.get_close_matches(name, known, n=10)
    found = [each for each in found if each[0] == name[0]] or found
    alike = {each: difflib.SequenceMatcher(None, each, name).ratio() for each in found}
    return [each for each in found if alike[each] > alike[found[0]] - 0.1][:3]


def _own_module(kind: str, name: str) -> str:
    """Return a hint with the dotted name, if ``name`` is that of a module or a package in the working folder."""
    holds = KINDS[kind].holds if kind in KINDS else "Class"
    if holds and name.isidentifier() and Path(f"{name}.py").is_file():
        return f"for your own {name}.py, write {name}.{holds}, with the name of the class in it"
    modules = sorted(path.stem for path in Path(name).glob("[!_]*.py")) if name.isidentifier() else []
    dotted = " or ".join(f"{name}.{module}" for module in modules[:3])
    return f"for your own {kind} in the folder {name}, write {dotted}" if modules else ""
