"""Hints for the name of a part that was not found: what may be meant, and how it is written."""

from __future__ import annotations

import difflib
import inspect
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path

from harness.errors import similar


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the up to three of ``known`` that are about as similar to ``name`` as the most similar one; or
    the one that ``name`` is with an addition, as in adamw_torch."""
    known = list(known)
    if (first := name.partition("_")[0]) in known and name.replace("_", "") not in known:
        return [first]
    found = difflib.get_close_matches(name, known, n=10)
    found = [each for each in found if each[0] == name[0]] or found
    alike = {each: difflib.SequenceMatcher(None, each, name).ratio() for each in found}
    return [each for each in found if alike[each] > alike[found[0]] - 0.1][:3]


def own_module(kind: str, name: str, holds: str | None) -> str:
    """Return a hint with the dotted name, if ``name`` is that of a module or a package in the working folder."""
    if holds and name.isidentifier() and Path(f"{name}.py").is_file():
        return f"for your own {name}.py, write {name}.{holds}, with the name of the class in it"
    modules = sorted(path.stem for path in Path(name).glob("[!_]*.py")) if name.isidentifier() else []
    dotted = " or ".join(f"{name}.{module}" for module in modules[:3])
    return f"for your own {kind} in the folder {name}, write {dotted}" if modules else ""


def import_hint(name: str, error: BaseException, holds: str | None) -> str:
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
