"""``install`` and ``uninstall``: imports of ``apex``, ``amp_C`` and ``apex_C`` resolve to harness.apex.

``apex.amp`` is then the same module object as ``harness.apex.amp``, so there is one state and one set of classes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.apex import legacy_paths, safe_load
from harness.apex.patches import is_imported, patches

EXTENSIONS = ("amp_C", "apex_C", "fused_adam_cuda")  # compiled modules that Apex installed next to the package


def install(trust_checkpoints: bool = False) -> None:
    """Make ``import apex`` mean harness.apex, even if another package of that name is installed or already imported.

    An imported ``apex`` is set aside until ``uninstall``; objects that a script took from it do not change. ``amp_C``
    and ``apex_C`` resolve to this package too, unless real ones are installed. ``torch.load`` accepts the plain data
    of old checkpoints, and with ``trust_checkpoints`` any other object, which can run code; see ``safe_load``.
    Calling it again only adds ``trust_checkpoints``.
    """
    _finder.trusts_checkpoints |= trust_checkpoints
    if _finder in sys.meta_path:
        return
    for name in [name for name in sys.modules if _is_apex(name)]:
        _set_aside[name] = sys.modules.pop(name)
    sys.modules["apex"] = importlib.import_module("harness.apex")
    sys.meta_path.insert(0, _finder)
    _finder.extend_load_once()


def uninstall() -> None:
    """Undo ``install``, and every patch that ``harness.apex`` made to run a script.

    Modules imported meanwhile stay usable. Calling it again does nothing.
    """
    patches.close()
    _finder.trusts_checkpoints = _finder.extends_load = False
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


def import_part(name: str) -> ModuleType:
    """Import ``harness.apex.<name>``; after ``install()`` with the old submodules and names that ``apex.<name>`` has.

    Scripts use ``apex.parallel.distributed.flat_dist_call`` after nothing but ``import apex``.
    """
    module = importlib.import_module(f"harness.apex.{name}")
    if _finder in sys.meta_path:
        importlib.import_module(f"apex.{name}")
    return module


class _Metadata(Distribution):
    """The installed distribution apex, which libraries look up to see if Apex is installed.

    The version is that of NVIDIA's Apex, which never had another, with a local part that names this package.
    """

    def read_text(self, filename: str) -> str | None:
        summary = "The Apex API on plain PyTorch, by harness.apex; not NVIDIA's own"
        text = f"Metadata-Version: 2.1\nName: apex\nVersion: 0.1+harness\nSummary: {summary}\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder(DistributionFinder):
    """Finds ``apex.X`` as ``harness.apex.X``, and explains what does not exist."""

    trusts_checkpoints = False
    extends_load = False  # torch.load reads old checkpoints

    def extend_load_once(self) -> None:
        """Let ``torch.load`` read old checkpoints once both torch and numpy are imported by someone else."""
        if not self.extends_load and is_imported("torch") and is_imported("numpy"):
            self.extends_load = True
            safe_load.extend_load(lambda: self.trusts_checkpoints)

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        name = getattr(context, "name", None)  # None asks for all distributions
        return [_Metadata()] if name is None or name.lower() == "apex" else []

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        self.extend_load_once()  # every import passes here, so torch and numpy are noticed
        if name in EXTENSIONS:
            return None if _is_installed(name, path) else ModuleSpec(name, _ExistingModule(f"harness.apex.{name}"))
        # `from apex import contrib` looks for harness.apex.contrib, after the real name of the package
        in_apex = name.removeprefix("harness.") if name.startswith("harness.apex.") else name
        if not in_apex.startswith("apex."):
            return None
        absent = legacy_paths.why_absent(in_apex)
        module = None if absent is not None or in_apex != name else legacy_paths.find_module(name)
        if module is not None:
            return ModuleSpec(name, _ExistingModule(module), is_package=hasattr(module, "__path__"))
        if absent is None and in_apex != name:
            return None
        if _is_called_by_find_spec():
            return None
        message = f"No module named {name!r}: apex is harness.apex here, which has no such module"
        raise ModuleNotFoundError(absent or message, name=in_apex)


class _ExistingModule(Loader):
    """Loads a module that exists already, under another name."""

    def __init__(self, module: ModuleType | str) -> None:
        self._module = module
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._module) if isinstance(self._module, str) else self._module
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        name = module.__spec__.name if module.__spec__ is not None else ""
        module.__spec__ = self._spec  # the import system has just replaced it
        _add_missing_names(name, module)
        if hasattr(module, "__path__"):
            _add_submodules(name, module)


def _add_submodules(package: str, module: ModuleType) -> None:
    """Add the submodules of ``package`` to ``sys.modules`` right away, without importing them one by one.

    The import system sets each module that it imports as an attribute of its package, which would hide the function
    ``amp.scale_loss`` and the object ``amp._amp_state``, whose modules have the same names.
    """
    prefix = f"{module.__name__}."
    for name in [name for name in sys.modules if name.startswith(prefix)]:
        alias = f"{package}.{name.removeprefix(prefix)}"
        if sys.modules.setdefault(alias, sys.modules[name]) is sys.modules[name] and hasattr(
            sys.modules[name], "__path__"
        ):
            _add_submodules(alias, sys.modules[name])
    for name in legacy_paths.modules_in(package):
        submodule = sys.modules.get(name) or legacy_paths.find_module(name)
        sys.modules[name] = submodule
        _add_missing_names(name, submodule)
        child = name.rpartition(".")[2]
        if child not in vars(module):
            patches.set(module, child, submodule)


def _add_missing_names(name: str, module: ModuleType) -> None:
    for missing, value in legacy_paths.missing_names(name, module).items():
        patches.set(module, missing, value)


def _is_called_by_find_spec() -> bool:
    """Return True during ``importlib.util.find_spec``, which expects None where an import expects an error."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "importlib.util"


def _is_apex(name: str) -> bool:
    return name == "apex" or name.startswith("apex.")


def _is_installed(name: str, path: Sequence[str] | None) -> bool:
    finders = [finder for finder in sys.meta_path if finder is not _finder and hasattr(finder, "find_spec")]
    return any(finder.find_spec(name, path, None) is not None for finder in finders)


_finder = _Finder()
_set_aside: dict[str, ModuleType] = {}
