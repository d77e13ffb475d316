"""Parts that a YAML file names: modules of the package's own folders (tasks, engines), found by listing the folder.

A part is one file, ``harness/tasks/NAME.py``, or a folder with an entry module, ``harness/tasks/NAME/config.py``.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

_HARNESS = Path(__file__).parents[1]
_ENTRIES = {"tasks": "config", "engines": "engine"}  # the module of a folder that holds the part
_SHARED = {"engines": {"base", "command", "launch"}}  # modules beside the parts that are none


def names(kind: str) -> list[str]:
    """The parts in ``harness/KIND``, sorted; nothing is imported."""
    folder = _HARNESS / kind
    files = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    folders = {path.parent.name for path in folder.glob(f"*/{_ENTRIES[kind]}.py")}
    return sorted((files | folders) - _SHARED.get(kind, set()))


def load(kind: str, name: str) -> ModuleType:
    """The module of the part ``name`` of ``harness/KIND``."""
    is_folder = (_HARNESS / kind / name).is_dir()
    return importlib.import_module(f"harness.{kind}.{name}.{_ENTRIES[kind]}" if is_folder else f"harness.{kind}.{name}")
