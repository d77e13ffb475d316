"""O1 and O4: casts around operations, for the whole process (contract 3.6, 4).

The engine is ``torch.autocast``, left on from one ``initialize`` to the next, plus the lists of ``cast_lists``: where a
device's autocast rules differ, a kernel under its autocast dispatch key casts (see ``cast_kernels``). So the dtypes are
Apex's at O1, and those of autocast for CUDA at O4, on every device, no matter how an operation is called (function,
method, module, C++), even under ``torch.compile``. float64 tensors are never cast.

Measured against wrappers in the torch namespaces and a ``TorchFunctionMode``, kernels cost the same per step, within
3 %: most of it is norms and O1's gelu in float32. So reach decides: wrapped namespaces miss names that were imported
before (``from torch.nn.functional import ...``) and calls that bypass them.

There is no weight cache: a weight used twice in one forward is cast twice, and writes to a weight take effect at once.
(The cache of ``torch.autocast`` lives until its outermost ``with`` ends; left on without one, it would serve stale
weights.) Like all of autocast the state belongs to the calling thread; a forked child starts with casts off.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.apex.amp import cast_kernels, cast_lists
from harness.apex.amp.cast_report import report_casts
from harness.apex.dtypes import REDUCED
from harness.apex.patches import Patches

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}


class CastEngine:
    """Casts that are on or off for this process. One instance, ``engine``."""

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self._libraries: dict[str, torch.library.Library] = {}
        self._before: dict[str, tuple[bool, torch.dtype]] = {}
        self._cache_before = True
        self._patches = Patches()
        self._lists, self._allow_banned = cast_lists.APEX, False
        self.registered: list[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = []
        """(owner, name, what makes its replacement) of each function that a script has registered; see
        ``function_casts``. They are replaced while casts are on."""
        self._report: ExitStack | None = None

    @property
    def active(self) -> bool:
        """True while O1 or O4 is active, even inside ``disable_casts``."""
        return self.dtype is not None

    @property
    def device_types(self) -> list[str]:
        """The device types whose operations are cast."""
        return list(self._before)

    def start(
        self,
        dtype: torch.dtype,
        device_types: Iterable[str],
        lists: cast_lists.CastLists = cast_lists.APEX,
        *,
        allow_banned: bool = False,
        verbose: bool = False,
    ) -> None:
        """Turn casts to ``dtype`` on for the operations of ``lists`` on ``device_types``.

        ``allow_banned``: a banned operation runs in float32 instead of raising. ``verbose``: print every cast.
        """
        self.stop()
        self.dtype = dtype
        self._lists, self._allow_banned = lists, allow_banned
        self._report = report_casts() if verbose else None
        self._cache_before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        for device_type in device_types:
            self.add(device_type)
        self._replace(Tensor, "cpu", _cpu_as_float32)
        for name in lists.banned_in_place:
            self._replace(Tensor, name, _banned_method)
        for name in lists.float32_functions:
            self._replace(nn.functional, name, _in_float32)
        for owner, name, annotated in self.registered:
            self._patches.set(owner, name, annotated(getattr(owner, name)))

    def _replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._patches.set(owner, name, make(getattr(owner, name)), yields=True)  # to harness.apex.uninstall

    def add(self, device_type: str) -> None:
        """Cast operations on ``device_type`` too."""
        if self.dtype is None or device_type in self._before:
            return
        self._before[device_type] = (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        torch.set_autocast_dtype(device_type, self.dtype)
        torch.set_autocast_enabled(device_type, True)
        if device_type in _KEYS:
            self._libraries[device_type] = cast_kernels.register(
                _KEYS[device_type], self.dtype, self._lists, self._allow_banned
            )

    def enter_thread(self) -> None:
        """Cast as in the thread that called ``start``, in one where ``torch.autocast`` is on with its default dtype."""
        for device_type in filter(torch.is_autocast_enabled, self._before):
            torch.set_autocast_dtype(device_type, self.dtype or torch.get_autocast_dtype(device_type))
            torch.set_autocast_cache_enabled(False)

    def stop(self) -> None:
        """Turn casts off and restore torch."""
        if self.dtype is None:
            return
        for device_type, (enabled, dtype) in self._before.items():
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        for library in self._libraries.values():
            library._destroy()  # torch has no public way to deregister kernels
        torch.set_autocast_cache_enabled(self._cache_before)
        if self._report is not None:
            self._report.close()
        self._patches.close()
        self._libraries, self._before, self.dtype, self._report = {}, {}, None, None


engine = CastEngine()


def _start_child_without_casts() -> None:
    for device_type in engine.device_types:
        torch.set_autocast_enabled(device_type, False)


# A data loader's worker prepares data and does not train: its tensors stay as they are, as on a GPU run.
os.register_at_fork(after_in_child=_start_child_without_casts)


@contextmanager
def disable_casts() -> Iterator[None]:
    """Context in which operations run in the dtype of their arguments. Can be nested, and ends even if its body
    raises."""
    before = {device_type: torch.is_autocast_enabled(device_type) for device_type in engine.device_types}
    for device_type in before:
        torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        for device_type, enabled in before.items():
            if device_type in engine.device_types:  # an initialize inside may have turned O1 off
                torch.set_autocast_enabled(device_type, enabled)


def enter_model(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Forward pre-hook of a model under O1.

    Casts on the model's device too, if it has moved since ``initialize``. float64 tensors among the model's arguments
    become float32, unless the model has float64 parameters: operations do not cast float64, as Apex's did, so a script
    whose data is float64 (``numpy.array(images, dtype=float)``) would fail at its first layer.
    """
    if getattr(module, "_is_replica", False):  # of DataParallel, in a thread of its own, without parameters
        engine.enter_thread()
    first = next(module.parameters(), None)
    if first is None:
        return None
    engine.add(first.device.type)
    if not any(map(_is_float64, (*args, *kwargs.values()))) or any(map(_is_float64, module.parameters())):
        return None
    args = tuple(arg.float() if _is_float64(arg) else arg for arg in args)
    return args, {name: arg.float() if _is_float64(arg) else arg for name, arg in kwargs.items()}


def _is_float64(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float64


def _is_cast(tensor: Tensor) -> bool:
    """Return True for a reduced-precision tensor on a device whose operations are being cast."""
    return tensor.dtype in REDUCED and torch.is_autocast_enabled(tensor.device.type)


def _cpu_as_float32(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make ``Tensor.cpu`` of O1: reduced precision is returned as float32, as numpy requires (contract 4.1)."""

    def cpu(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return plain(self.float() if _is_cast(self) else self, *args, **kwargs)

    return cpu


def _in_float32(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that computes in float32 as a whole, not by its parts (``float32_functions``)."""

    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        positional = [arg.float() if isinstance(arg, Tensor) and _is_cast(arg) else arg for arg in args]
        named = {key: arg.float() if isinstance(arg, Tensor) and _is_cast(arg) else arg for key, arg in kwargs.items()}
        return plain(*positional, **named)

    return function


def _banned_method(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make an in-place method refuse float16, into which O1's float32 result cannot be written (contract 4.1).

    Only the method, not the operation: torch uses these in place internally, on tensors of its own.
    """
    name = plain.__name__

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _is_cast(self):
            raise NotImplementedError(
                f"{name} was called under O1 on a {self.dtype} tensor. {name[:-1]} is computed in float32 there, and "
                f"the result cannot be written into the tensor. Use x = x.{name[:-1]}(...), or turn casts off with "
                f"amp.disable_casts() around x.{name}(...)."
            )
        return plain(self, *args, **kwargs)

    return method
