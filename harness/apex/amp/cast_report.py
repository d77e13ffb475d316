"""Prints a line for every cast that O1 and O4 make: ``verbosity=2`` (contract 1.9).

For debugging; it slows every operation. A function mode records which function the script called; a dispatch mode below
autocast sees the resulting copies.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_ASKED_FOR = {"to", "type", "type_as", "half", "float", "bfloat16", "double", "cpu", "cuda", "backward"}


def report_casts() -> ExitStack:
    """Print a line for every cast in the calling thread until the stack is closed.

    Casts in the backward pass, where autograd casts gradients back, and casts that the script asks for are not
    reported.
    """
    stack = ExitStack()
    calls = stack.enter_context(_Calls())
    stack.enter_context(_Copies(calls))
    return stack


class _Calls(TorchFunctionMode):
    """Keeps the name of the outermost torch function being called as ``name``."""

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outermost, self.name = self.name, self.name or getattr(func, "__name__", str(func))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.name = outermost


class _Copies(TorchDispatchMode):
    """Prints a line for each change between floating dtypes in a function that is not itself a cast."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = self._calls.name
        if func is torch.ops.aten._to_copy.default and name is not None and name not in _ASKED_FOR:
            before, after = args[0].dtype, result.dtype
            if before is not after and before.is_floating_point and after.is_floating_point:
                print(f"amp: {name}: {_short(before)} -> {_short(after)} {tuple(result.shape)}")
        return result


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
