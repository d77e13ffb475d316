"""The kernels with which O1 and O4 cast: under an autocast dispatch key, where ``cast_lists`` differ from its rules.

Each kernel casts its arguments, then calls the operation with the key excluded, so nothing below it is cast again.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet
from torch._ops import OpOverload

from harness.apex.amp import cast_lists
from harness.apex.amp.cast_lists import APEX, AUTOCAST, BANNED, THROUGH_FLOAT32, UNTOUCHED, CastLists
from harness.apex.dtypes import REDUCED, wide

_CUDA = "AutocastCUDA"
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)
# Older torch has no allow_override, and warns about each replaced kernel.
_OVERRIDE = (
    {"allow_override": True} if "allow_override" in inspect.signature(torch.library.Library.impl).parameters else {}
)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a float32, float16 or bfloat16 tensor, or a list or tuple of only such; return anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in _CASTABLE else value
    if isinstance(value, list | tuple) and value and all(isinstance(v, Tensor) and v.dtype in _CASTABLE for v in value):
        return type(value)([v.to(dtype) for v in value])
    return value


def widest_dtype(values: Iterable[Any]) -> torch.dtype | None:
    """Return the promotion of the floating dtypes among the tensors in ``values``; None if they are all the same."""
    tensors = [t for value in values for t in (value if isinstance(value, list | tuple) else (value,))]
    dtypes = {t.dtype for t in tensors if isinstance(t, Tensor) and t.is_floating_point()}
    if len(dtypes) < 2:
        return None
    first, *others = dtypes
    for other in others:
        first = torch.promote_types(first, other)
    return first


def register(key: str, dtype: torch.dtype, lists: CastLists, allow_banned: bool) -> torch.library.Library:
    """Register the kernels for casts to ``dtype`` under the dispatch key ``key``; ``_destroy()`` removes them."""
    library = torch.library.Library("aten", "IMPL")
    makers: list[tuple[Iterable[str], Callable[[OpOverload, DispatchKeySet], Callable[..., Any]]]] = [
        (lists.reduced, lambda op, below: _ruled_kernel(op, below, lambda _: dtype)),
        (lists.float32, _float32_kernel),
        (lists.widest, lambda op, below: _ruled_kernel(op, below, widest_dtype)),
        (BANNED, _float32_kernel if allow_banned else _banned_kernel),
        (UNTOUCHED, lambda op, below: torch.library.fallthrough_kernel),
        (THROUGH_FLOAT32, _rounding_kernel),
    ]
    below = DispatchKeySet(getattr(torch._C.DispatchKey, key))
    for names, make in makers:
        for name in names:
            for op in _functional_overloads(name):
                if _differs(op, name, key, lists, dtype):
                    implement(library, op, make(op, below), key)
    return library


def _differs(op: OpOverload, name: str, key: str, lists: CastLists, dtype: torch.dtype) -> bool:
    """Return whether ``op`` needs a kernel of ours under ``key``, because torch has none there or one with another
    rule."""
    if name in cast_lists.CUDNN_RECURRENT and key == _CUDA:
        # torch casts below, in cuDNN's operation, into the one piece of memory that cuDNN wants: always to float16.
        return dtype is not torch.float16
    if name in UNTOUCHED + THROUGH_FLOAT32:
        return name in UNTOUCHED or key != _CUDA
    return (_differs_from_autocast if lists is AUTOCAST else _differs_from_apex)(op, name, key)


def _differs_from_apex(op: OpOverload, name: str, key: str) -> bool:
    return name in APEX.overrides_builtin or not _has_kernel(op.name(), key)


def _differs_from_autocast(op: OpOverload, name: str, key: str) -> bool:
    """``torch.autocast``'s kernels for CUDA are the rule."""
    if key == _CUDA:
        return name in cast_lists.REGISTERED_EVEN_ON_CUDA
    has_rule = name in cast_lists.REGISTERED_EVEN_ON_CUDA or _has_kernel(op.name(), _CUDA)
    return has_rule and (name in AUTOCAST.overrides_builtin or not _has_kernel(op.name(), key))


@functools.cache
def _functional_overloads(name: str) -> tuple[OpOverload, ...]:
    """Return the overloads of an ATen operation that return new tensors; none if this torch lacks the operation."""
    packet = getattr(torch.ops.aten, name, None)
    ops = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    # Overloads on plain numbers belong to TorchScript alone and have no kernels.
    return tuple(op for op in ops if not op._schema.is_mutable and torch._C._dispatch_has_kernel(op.name()))


def implement(
    library: torch.library.Library, op: OpOverload, kernel: Callable[..., Any], key: str, with_keyset: bool = False
) -> None:
    """Make ``kernel`` that of ``op`` under the dispatch key ``key``, also if there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(op, kernel, key, with_keyset=with_keyset, **_OVERRIDE)


def _float32_kernel(op: OpOverload, below: DispatchKeySet) -> Callable[..., Any]:
    guard, half, bfloat = torch._C._ExcludeDispatchKeyGuard, torch.float16, torch.bfloat16

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with guard(below):
            if kwargs.get("dtype") is not None or (len(args) > 2 and isinstance(args[2], torch.dtype)):
                return op(*args, **kwargs)  # the caller chose the dtype
            full = [a.float() if isinstance(a, Tensor) and (a.dtype is half or a.dtype is bfloat) else a for a in args]
            return op(*full, **kwargs)

    return kernel


def _ruled_kernel(
    op: OpOverload, below: DispatchKeySet, rule: Callable[[Iterable[Any]], torch.dtype | None]
) -> Callable[..., Any]:
    """Return a kernel that casts the arguments to the dtype that ``rule`` chooses for them, if it chooses one."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below):
            dtype = rule(args)
            return op(*([cast(arg, dtype) for arg in args] if dtype is not None else args), **kwargs)

    return kernel


def _rounding_kernel(op: OpOverload, below: DispatchKeySet) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below):
            return op(args[0].to(wide(args[0])), *args[1:], **kwargs).to(args[0].dtype)

    return kernel


def _banned_kernel(op: OpOverload, below: DispatchKeySet) -> Callable[..., Any]:
    name = op.overloadpacket.__name__

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, Tensor) and arg.dtype in REDUCED for arg in args):
            raise NotImplementedError(
                f"{name} was called under O1 or O4 with a float16 or bfloat16 input, where its gradient overflows. "
                f"{BANNED[name]}"
            )
        with torch._C._ExcludeDispatchKeyGuard(below):
            return op(*args, **kwargs)

    return kernel
