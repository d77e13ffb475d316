"""``install`` and ``uninstall``: imports of ``apex``, ``amp_C`` and ``apex_C`` resolve to harness.apex.

``apex.amp`` is then the very module that ``harness.apex.amp`` is, never a second copy, so state and classes are one.
Not here: which old paths lead where (``legacy_paths``), running scripts (``runner``).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from harness.apex import legacy_paths, plain_data
from harness.apex.patches import patches

EXTENSIONS = ("amp_C", "apex_C")  # modules of Apex's that stood beside the package


def install() -> None:
    """Make ``import apex`` mean harness.apex, whatever package of that name is installed or was imported.

    An ``apex`` that was imported before is set aside until ``uninstall``; what a script took from it stays what it was.
    ``amp_C`` and ``apex_C`` become ours too, unless there are real ones. ``torch.load`` takes the plain data that old
    scripts put into checkpoints, see ``plain_data``. Calling it again does nothing.
    """
    if _finder in sys.meta_path:
        return
    for name in [name for name in sys.modules if _is_apex(name)]:
        _set_aside[name] = sys.modules.pop(name)
    sys.modules["apex"] = importlib.import_module("harness.apex")
    sys.meta_path.insert(0, _finder)
    plain_data.allow_when_imported()


def uninstall() -> None:
    """Undo ``install``, and with it every patch made by ``harness.apex`` for a script that it runs.

    What was imported through it stays usable. Calling it again does nothing.
    """
    patches.undo()
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    for name in [name for name in sys.modules if _is_apex(name)]:
        del sys.modules[name]
    for name in EXTENSIONS:
        if getattr(sys.modules.get(name), "__name__", "") == f"harness.apex.{name}":
            del sys.modules[name]
    sys.modules.update(_set_aside)
    _set_aside.clear()


class _Finder(MetaPathFinder):
    """Finds ``apex.X`` as ``harness.apex.X``, and says what is not there and why."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        plain_data.allow_when_imported()
        if name in EXTENSIONS:
            return None if _is_found_elsewhere(name, path) else ModuleSpec(name, _Alias(f"harness.apex.{name}"))
        # `from apex import contrib` asks for a part of the package that `apex` says it is: harness.apex
        asked = name.removeprefix("harness.") if name.startswith("harness.apex.") else name
        if not asked.startswith("apex."):
            return None
        absent = legacy_paths.why_absent(asked)
        if absent is not None:
            if _only_asked():
                return None
            raise ModuleNotFoundError(absent, name=asked)
        if asked != name:
            return None
        module = legacy_paths.module_of(name)
        if module is None:
            if _only_asked():
                return None
            raise ModuleNotFoundError(
                f"No module named {name!r}: apex is harness.apex here, and has no such module", name=name
            )
        return ModuleSpec(name, _Alias(module), is_package=hasattr(module, "__path__"))


class _Alias(Loader):
    """Loads a module by handing out one that exists, as it is."""

    def __init__(self, module: ModuleType | str) -> None:
        self._module = module
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._module) if isinstance(self._module, str) else self._module
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        name = module.__spec__.name if module.__spec__ is not None else ""
        module.__spec__ = self._spec  # the import system has just written its own there
        for missing, value in legacy_paths.names_lacking(name, module).items():
            patches.set(module, missing, value)
        if hasattr(module, "__path__"):
            _add_contents(name, module)


def _add_contents(package: str, module: ModuleType) -> None:
    """Enter what is in ``package`` into ``sys.modules`` along with it.

    The import system sets a module that it loads as an attribute of its package, which would hide the function
    ``amp.scale_loss`` and the object ``amp._amp_state``, whose modules have the same names.
    """
    loaded = f"{module.__name__}."
    for name in [name for name in sys.modules if name.startswith(loaded)]:
        sys.modules.setdefault(f"{package}.{name.removeprefix(loaded)}", sys.modules[name])
    for name in legacy_paths.modules_in(package):
        found = sys.modules.get(name) or legacy_paths.module_of(name)
        sys.modules[name] = found
        for missing, value in legacy_paths.names_lacking(name, found).items():
            patches.set(found, missing, value)
        child = name.rpartition(".")[2]
        if child not in vars(module):
            patches.set(module, child, found)


def _only_asked() -> bool:
    """Whether ``importlib.util.find_spec`` is asking, to which the answer is None, and not an import."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "importlib.util"


def _is_apex(name: str) -> bool:
    return name == "apex" or name.startswith("apex.")


def _is_found_elsewhere(name: str, path: Sequence[str] | None) -> bool:
    finders = [finder for finder in sys.meta_path if finder is not _finder and hasattr(finder, "find_spec")]
    return any(finder.find_spec(name, path, None) is not None for finder in finders)


_finder = _Finder()
_set_aside: dict[str, ModuleType] = {}
