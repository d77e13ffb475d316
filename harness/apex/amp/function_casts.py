"""Precision for functions that amp does not list: decorators and registrations (contract 1.5).

Without O1 or O4, and inside ``disable_casts``, they call through. The arguments are cast; operations inside the
function are cast as usual, except in a ``float_function`` and in registered torch operations, where the script's choice
is final. float64 tensors are left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from harness.apex.amp.cast_engine import disable_casts, engine
from harness.apex.amp.cast_kernels import cast, widest_dtype

Function = TypeVar("Function", bound=Callable[..., Any])
Rule = Callable[[list[Any]], torch.dtype | None]  # arguments -> the dtype to cast them to, or None


def _half(arguments: list[Any]) -> torch.dtype | None:
    return engine.dtype


def _bfloat16(arguments: list[Any]) -> torch.dtype | None:
    return torch.bfloat16


def _float(arguments: list[Any]) -> torch.dtype | None:
    return torch.float32


def _annotate(function: Function, rule: Rule, final: bool) -> Function:
    """Return ``function`` with its arguments cast by ``rule``; if ``final``, operations inside it are not cast."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not any(map(torch.is_autocast_enabled, engine.device_types)):  # O1 and O4 are off
            return function(*args, **kwargs)
        dtype = rule([*args, *kwargs.values()])
        if dtype is not None:
            args = tuple(cast(arg, dtype) for arg in args)
            kwargs = {name: cast(arg, dtype) for name, arg in kwargs.items()}
        with disable_casts() if final else nullcontext():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def half_function(fn: Function) -> Function:
    """Decorator: under O1 and O4 ``fn`` receives its floating tensors in that level's reduced precision."""
    return _annotate(fn, _half, final=False)


def bfloat16_function(fn: Function) -> Function:
    """Decorator: under O1 and O4 ``fn`` receives its floating tensors in bfloat16."""
    return _annotate(fn, _bfloat16, final=False)


def float_function(fn: Function) -> Function:
    """Decorator: under O1 and O4 ``fn`` receives its floating tensors in float32 and computes in it."""
    return _annotate(fn, _float, final=True)


def promote_function(fn: Function) -> Function:
    """Decorator: under O1 and O4 ``fn`` receives its floating tensors in the widest of their dtypes."""
    return _annotate(fn, widest_dtype, final=False)


def _register(module: Any, name: str, rule: Rule) -> None:
    if not hasattr(module, name):
        raise ValueError(
            f"No function named {name} in {getattr(module, '__name__', module)}. Pass the module (or class) that holds "
            "the function and the function's name as a string."
        )
    home = str(getattr(module, "__module__", None) or getattr(module, "__name__", ""))  # of a class, of a module
    final = home.split(".")[0] == "torch" or rule is _float
    engine.registered.append((module, name, lambda function: _annotate(function, rule, final)))


def register_half_function(module: Any, function_name: str) -> None:
    """Make ``module.function_name`` a ``half_function`` from the next O1 or O4 ``initialize`` on."""
    _register(module, function_name, _half)


def register_bfloat16_function(module: Any, function_name: str) -> None:
    """Make ``module.function_name`` a ``bfloat16_function`` from the next O1 or O4 ``initialize`` on."""
    _register(module, function_name, _bfloat16)


def register_float_function(module: Any, function_name: str) -> None:
    """Make ``module.function_name`` a ``float_function`` from the next O1 or O4 ``initialize`` on."""
    _register(module, function_name, _float)


def register_promote_function(module: Any, function_name: str) -> None:
    """Make ``module.function_name`` a ``promote_function`` from the next O1 or O4 ``initialize`` on."""
    _register(module, function_name, widest_dtype)
