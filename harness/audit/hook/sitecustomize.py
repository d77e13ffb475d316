"""Starts the recorder of ``harness verify-resume`` in a process of somebody's training script.

Python imports this module at startup, since its folder is the first of PYTHONPATH. A ``sitecustomize`` that it hides is
run as well.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
PLAN = "RESUME_AUDIT"


class _AfterImport:
    """A finder that calls a function with a module once it has been imported."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        action = self._actions.pop(name, None)
        spec = importlib.util.find_spec(name) if action is not None else None
        if spec is None or spec.loader is None or action is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def _record(torch: ModuleType) -> None:
    sys.path.insert(0, HERE)
    try:
        import resume_recorder
    finally:
        sys.path.remove(HERE)
    resume_recorder.start(os.environ[PLAN], actions)


def _record_run(resuming: ModuleType) -> None:
    sys.modules["resume_recorder"].of_harness(resuming)


actions: dict[str, Callable[[ModuleType], None]] = {
    "torch": _record,
    "harness.training.checkpoints.resuming": _record_run,
}


def _run_hidden() -> None:
    """Run the sitecustomize that Python would have imported without this one."""
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if PLAN in os.environ:
    sys.meta_path.insert(0, _AfterImport(actions))  # type: ignore[arg-type]
    _run_hidden()
