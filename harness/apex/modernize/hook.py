"""Applies ``table`` to each library once it is imported, and creates the modules that no longer exist."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from harness.apex import call_counter
from harness.apex.modernize.table import CALLS, NAMES, RENAMED_MODULES
from harness.apex.patches import around, is_imported, patches


def modernize() -> None:
    """Restore what the table lists in this process, until ``harness.apex.uninstall``. Calling it again does nothing."""
    if _finder in sys.meta_path:
        return
    call_counter.reset(call_counter.MODERNIZE)
    sys.meta_path.insert(0, _finder)
    patches.callback(sys.meta_path.remove, _finder)
    for name in _MODULES:
        if is_imported(name):
            _apply(name)


class _Finder(MetaPathFinder):
    """Leaves finding modules to the other finders, and has the table applied after a module of the table has run."""

    def __init__(self) -> None:
        self._search = threading.local()  # the module that this thread looks for: another finder may ask us for it

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name not in _MODULES or getattr(self._search, "name", None) == name:
            return None
        others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        outer, self._search.name = getattr(self._search, "name", None), name
        try:
            spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        finally:
            self._search.name = outer
        if spec is None:  # the library removed the whole module, or is not installed
            return ModuleSpec(name, _RemovedModule()) if "." in name else None
        if spec.loader is not None and not inspect.isclass(spec.loader):
            _apply_after(spec.loader, name)
        return spec


class _RemovedModule(Loader):
    """Loads an empty module, which gets its names from the table."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        parent, _, child = name.rpartition(".")

        def remove() -> None:
            sys.modules.pop(name, None)
            vars(sys.modules.get(parent, module)).pop(child, None)

        patches.callback(remove)
        _apply(name)


def _apply_after(loader: Any, name: str) -> None:
    """Have ``loader``, which belongs to one import, apply the table after it has run the module."""
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        loader.exec_module = original
        original(module)
        _apply(name)

    loader.exec_module = exec_module


def _apply(name: str) -> None:
    """Apply the table to the imported module ``name`` and its classes."""
    module = sys.modules[name]  # a module may replace itself when it runs
    if name in NAMES or name in RENAMED_MODULES:
        _add_names_to_module(module, name)
    for path, names in NAMES.items():
        if path.startswith(f"{name}:") and (owner := _resolved(module, path)) is not None:
            _add_names_to_class(owner, path.replace(":", "."), names)
    for call in CALLS:
        owner = _resolved(module, call.owner) if call.owner.partition(":")[0] == name else None
        if owner is not None and hasattr(owner, call.name):
            used = functools.partial(call_counter.count, call.label, call_counter.MODERNIZE)
            patches.replace(owner, call.name, around(getattr(owner, call.name), functools.partial(call.bridge, used)))


def _add_names_to_module(module: ModuleType, name: str) -> None:
    """Look names that ``module`` lacks up in the table, when the script uses them."""
    original: Callable[[str], Any] | None = vars(module).get("__getattr__")

    def __getattr__(attribute: str) -> Any:
        target = NAMES.get(name, {}).get(attribute)
        if name in RENAMED_MODULES and not attribute.startswith("__"):
            target = f"{RENAMED_MODULES[name]}:{attribute}"
        try:
            if original is not None:
                return original(attribute)
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}", name=attribute, obj=module)
        except AttributeError:
            if target is None:
                raise
        value = pkgutil.resolve_name(target)
        call_counter.count(f"{name}.{attribute}", call_counter.MODERNIZE)
        return value

    patches.set(module, "__getattr__", __getattr__)


def _add_names_to_class(owner: type, label: str, names: Mapping[str, str]) -> None:
    """Add the methods of ``names`` that ``owner``, listed as ``label``, lacks."""
    for name, target in names.items():
        if hasattr(owner, name):
            continue
        function = pkgutil.resolve_name(target)
        used = functools.partial(call_counter.count, f"{label}.{name}", call_counter.MODERNIZE)
        patches.set(owner, name, around(function, functools.partial(_called, used)))


def _called(used: Callable[[], None], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method that the class has lost."""
    used()
    return original(*args, **kwargs)


def _resolved(module: ModuleType, path: str) -> Any:
    """Return the module or its class that ``path`` names; None if this version of the library lacks the class."""
    attribute = path.partition(":")[2]
    return getattr(module, attribute, None) if attribute else module


_finder = _Finder()
_MODULES = {path.partition(":")[0] for path in (*NAMES, *RENAMED_MODULES, *(call.owner for call in CALLS))}
