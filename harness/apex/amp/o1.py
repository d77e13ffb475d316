"""O1 and O4: casts around operations, for the whole process (contract 3.6, 4).

The engine is ``torch.autocast``, left on from ``initialize`` to the next one, and taught Apex's lists: where a device's
autocast rules differ, a kernel under its autocast dispatch key casts and calls the operation with casts off. So the
dtypes are Apex's on every device, whichever way an operation is reached (function, method, module, C++), and also
under ``torch.compile``. float64 tensors are never cast.

Chosen by measurement (``benchmarks/apex_o1_engine.py``; processor time of a step on one CPU core, against autocast
alone): these kernels x0.97 on a convolutional network and x1.11 on a small transformer, wrappers in the torch
namespaces x0.94 and x1.10, a ``TorchFunctionMode`` x0.96 and x1.10. So the price is that of computing norms and gelu
in float32, not the engine's (about 8 us a listed operation), and reach decides: wrapping namespaces misses every early
``from torch.nn.functional import ...`` and every call that does not pass through them.

There is no weight cache: a weight used twice in one forward is cast twice, and what is written to a weight is seen at
once. (The cache of ``torch.autocast`` lives until its outermost ``with`` ends; without one it would serve stale
weights.) The state is that of the calling thread, like all of autocast; a forked child starts with casts off.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.apex.amp import lists
from harness.apex.amp.casting import REDUCED
from harness.apex.amp.report import CastReport

_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}


class CastEngine:
    """Casts that are on or off for this process. One instance, ``engine``."""

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self._libraries: dict[str, torch.library.Library] = {}
        self._before: dict[str, tuple[bool, torch.dtype]] = {}
        self._cache_before = True
        self._methods: list[str] = []
        self._allow_banned = False
        self._report: CastReport | None = None

    @property
    def active(self) -> bool:
        """Whether O1 or O4 is in force (also inside ``disable_casts``)."""
        return self.dtype is not None

    @property
    def device_types(self) -> list[str]:
        """The device types whose operations are cast."""
        return list(self._before)

    def start(
        self, dtype: torch.dtype, device_types: Iterable[str], *, allow_banned: bool = False, verbose: bool = False
    ) -> None:
        """Turn casts to ``dtype`` on for operations on ``device_types``.

        ``allow_banned``: a banned operation runs in float32 instead of raising. ``verbose``: print every cast.
        """
        self.stop()
        self.dtype = dtype
        self._allow_banned = allow_banned
        self._report = CastReport() if verbose else None
        if self._report is not None:
            self._report.start()
        self._cache_before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        for device_type in device_types:
            self.add(device_type)
        self._replace("cpu", _cpu_as_float32)
        for name in lists.BANNED_IN_PLACE:
            self._replace(name, _banned_method)

    def _replace(self, name: str, make: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        setattr(torch.Tensor, name, make(name, getattr(torch.Tensor, name)))
        self._methods.append(name)

    def add(self, device_type: str) -> None:
        """Cast operations on ``device_type`` as well."""
        if self.dtype is None or device_type in self._before:
            return
        self._before[device_type] = (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        torch.set_autocast_dtype(device_type, self.dtype)
        torch.set_autocast_enabled(device_type, True)
        if device_type in _KEYS:
            self._libraries[device_type] = _register(_KEYS[device_type], self.dtype, self._allow_banned)

    def stop(self) -> None:
        """Turn casts off and leave torch as it was."""
        if self.dtype is None:
            return
        for device_type, (enabled, dtype) in self._before.items():
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        for library in self._libraries.values():
            library._destroy()
        torch.set_autocast_cache_enabled(self._cache_before)
        if self._report is not None:
            self._report.stop()
        for name in self._methods:
            delattr(torch.Tensor, name)  # what is left is the inherited method
        self._libraries, self._before, self.dtype, self._report, self._methods = {}, {}, None, None, []


engine = CastEngine()


def _start_child_without_casts() -> None:
    for device_type in engine.device_types:
        torch.set_autocast_enabled(device_type, False)


# a data loader's worker prepares data, it does not train: its tensors stay as they are, as on a GPU run
os.register_at_fork(after_in_child=_start_child_without_casts)


@contextmanager
def disable_casts() -> Iterator[None]:
    """Inside, operations run in the dtype of their arguments. Nests, and ends with the block also when it raises."""
    before = {device_type: torch.is_autocast_enabled(device_type) for device_type in engine.device_types}
    for device_type in before:
        torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        for device_type, enabled in before.items():
            if device_type in engine.device_types:  # an initialize inside may have turned O1 off
                torch.set_autocast_enabled(device_type, enabled)


class FollowDevice:
    """Forward pre-hook of a model under O1: it may have moved to another device type since ``initialize``."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters():
            engine.add(parameter.device.type)
            return


def _is_cast(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of reduced precision on a device whose operations are being cast."""
    return tensor.dtype in REDUCED and torch.is_autocast_enabled(tensor.device.type)


def _cpu_as_float32(name: str, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``Tensor.cpu`` under O1: reduced precision arrives as float32, as numpy wants it (contract 4.1)."""

    def cpu(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return plain(self, *args, **kwargs).float() if _is_cast(self) else plain(self, *args, **kwargs)

    return cpu


def _banned_method(name: str, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An in-place method that O1 would compute in float32 but whose result must go where float16 is (contract 4.1).

    Only as a method: operations of torch use these in place inside, on tensors of their own.
    """

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _is_cast(self):
            raise NotImplementedError(
                f"{name} was called under O1 on a {self.dtype} tensor. {name[:-1]} is computed in float32 there, and "
                f"that cannot be written into the tensor. Type x = x.{name[:-1]}(...), or leave O1 with "
                f"amp.disable_casts() around x.{name}(...)."
            )
        return plain(self, *args, **kwargs)

    return method


def _register(key: str, dtype: torch.dtype, allow_banned: bool) -> torch.library.Library:
    """Kernels under the dispatch key ``key`` for the operations where it does not follow Apex's lists."""
    library = torch.library.Library("aten", "IMPL")
    makers: list[tuple[list[str], Callable[..., Any]]] = [
        (lists.REDUCED, lambda op, below: _reduced_kernel(op, below, dtype)),
        (lists.FLOAT32, _float32_kernel),
        (lists.WIDEST, _widest_kernel),
        (lists.BANNED, _float32_kernel if allow_banned else _banned_kernel),
        (lists.UNTOUCHED, lambda op, below: torch.library.fallthrough_kernel),
    ]
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    for names, make in makers:
        for name in names:
            for op in _functional_overloads(name):
                built_in = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)
                if not built_in or name in lists.REPLACED:
                    _implement(library, op, make(op, below), key)
    return library


def _functional_overloads(name: str) -> Iterator[Any]:
    """The overloads of an ATen operation that return new tensors; none where this torch has no such operation."""
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        op = getattr(packet, overload)
        # overloads on plain numbers belong to TorchScript alone and have no kernels
        if not op._schema.is_mutable and torch._C._dispatch_has_kernel(op.name()):
            yield op


def _implement(library: torch.library.Library, op: Any, kernel: Callable[..., Any], key: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a replaced kernel where it cannot be told to allow it
        if "allow_override" in inspect.signature(library.impl).parameters:
            library.impl(op, kernel, key, allow_override=True)
        else:
            library.impl(op, kernel, key)


def _float32_kernel(op: Any, below: Any) -> Callable[..., Any]:
    guard, half, bfloat = torch._C._ExcludeDispatchKeyGuard, torch.float16, torch.bfloat16

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with guard(below):
            if kwargs.get("dtype") is not None or (len(args) > 2 and isinstance(args[2], torch.dtype)):
                return op(*args, **kwargs)  # the caller said which dtype
            wide = [a.float() if isinstance(a, Tensor) and (a.dtype is half or a.dtype is bfloat) else a for a in args]
            return op(*wide, **kwargs)

    return kernel


def _reduced_kernel(op: Any, below: Any, dtype: torch.dtype) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below):
            return op(*[cast(arg, dtype) for arg in args], **kwargs)

    return kernel


def _widest_kernel(op: Any, below: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below):
            widest = widest_dtype(args)
            return op(*([cast(arg, widest) for arg in args] if widest is not None else args), **kwargs)

    return kernel


def _banned_kernel(op: Any, below: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, Tensor) and arg.dtype in REDUCED for arg in args):
            raise NotImplementedError(
                "binary_cross_entropy was called under O1 with a float16 or bfloat16 input, where its gradient "
                "overflows. Leave the sigmoid out and use torch.nn.BCEWithLogitsLoss, or pass input.float()."
            )
        with torch._C._ExcludeDispatchKeyGuard(below):
            return op(*args, **kwargs)

    return kernel


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A float32, float16 or bfloat16 tensor, or a list or tuple made only of such, in ``dtype``; the rest as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in _CASTABLE else value
    if isinstance(value, list | tuple) and value and all(isinstance(v, Tensor) and v.dtype in _CASTABLE for v in value):
        return type(value)([v.to(dtype) for v in value])
    return value


def widest_dtype(values: Iterable[Any]) -> torch.dtype | None:
    """The promotion of the floating dtypes among the tensors in ``values``; None when they do not differ."""
    tensors = [t for value in values for t in (value if isinstance(value, list | tuple) else (value,))]
    dtypes = {t.dtype for t in tensors if isinstance(t, Tensor) and t.is_floating_point()}
    if len(dtypes) < 2:
        return None
    first, *others = dtypes
    for other in others:
        first = torch.promote_types(first, other)
    return first
