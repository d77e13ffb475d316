"""Leaves out torch._dynamo, the front end of torch's compiler, until something is compiled.

Its import takes longer than that of torch. torchvision and torch's optimizers import it only to keep the compiler out
of a few functions, which matters once something is compiled.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"
_KEPT_OUT = "__dynamo_disable"  # where torch keeps the version of a function that is not compiled


def imported() -> bool:
    return NAME in sys.modules and not isinstance(sys.modules[NAME], _StandIn)


def until_imported(function: Callable[..., Any], after: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """``function`` as long as the compiler is not imported; then what ``after()`` returns."""
    other: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal other
        if not imported():
            return function(*args, **kwargs)
        other = other or after()
        return other(*args, **kwargs)

    return call


def disabled(function: Callable[..., Any], *given: Any, **options: Any) -> Callable[..., Any]:
    """``function``, kept out of compiled code: ``torch._dynamo.disable``."""
    return until_imported(function, lambda: importlib.import_module(NAME).disable(function, *given, **options))


def leave_out_of(method: Any) -> None:
    """Do not import the compiler at the first call of ``method``, which torch keeps out of compiled code. Where this
    version of torch is built differently, nothing changes."""
    function = getattr(method, "__wrapped__", None)
    if not imported() and function is not None and not hasattr(function, _KEPT_OUT):
        setattr(function, _KEPT_OUT, disabled(function))


@contextmanager
def left_out() -> Iterator[None]:
    """Context in which imported modules find a stand-in for the compiler, which imports it at its first real use."""
    if NAME in sys.modules:  # perhaps as a stand-in
        yield
        return
    stand_ins = {name: _StandIn(name) for name in (NAME, f"{NAME}.utils")}
    sys.modules |= stand_ins
    try:
        yield
    finally:
        _remove()


def _remove() -> None:
    for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
        del sys.modules[name]


class _StandIn(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = [str(Path(torch.__file__).with_name("_dynamo"))]

    def disable(self, function: Callable[..., Any], *given: Any, **options: Any) -> Callable[..., Any]:
        return disabled(function, *given, **options)

    def is_compile_supported(self, device: str) -> Any:
        return self._real().is_compile_supported(device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(), name)

    def _real(self) -> Any:
        _remove()
        return importlib.import_module(self.__name__)
