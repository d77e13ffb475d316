"""Replaces calls that take a CUDA device, or a CUDA type: tensor methods, factory functions, modules, files, loaders.

The namespace ``torch.cuda`` itself is in ``torch_cuda``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _device
from torch.utils.data import DataLoader

from harness.apex.on_cpu.call_counter import count, count_call, counted

Replacement = tuple[Any, str, Any]  # owner, attribute, new value

_LIKE = ["empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like", "normal"]
_NEW = ["new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"]
_TYPES = ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]


def names_cuda(device: Any) -> bool:
    """True if ``device`` means a CUDA device: "cuda", "cuda:1", torch.device("cuda", 1), or its number."""
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def takes_device(
    original: Any,
    name: str | None,
    *,
    position: int = -1,
    keyword: str = "device",
    default: str | None = None,
    count: Callable[[str], None] = count_call,
) -> Any:
    """``original``, with a CUDA device in the argument ``keyword``, or at ``position`` if not -1, replaced by the CPU.

    ``default`` is the device if the argument is missing. Redirections are counted under ``name``, if given.
    """

    @functools.wraps(original)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        positional = -1 < position < len(args) and keyword not in kwargs
        device = args[position] if positional else kwargs.get(keyword, default)
        if device is not None and names_cuda(device):
            if name is not None:
                count(name)
            if positional:
                args = (*args[:position], "cpu", *args[position + 1 :])
            else:
                kwargs[keyword] = "cpu"
        return original(*args, **kwargs)

    return on_cpu


def replacements() -> Iterator[Replacement]:
    """(owner, attribute, replacement) of everything that this module redirects."""
    yield Tensor, "cuda", _tensor_cuda
    yield Tensor, "to", takes_device(Tensor.to, "Tensor.to(cuda)", position=1)
    yield Tensor, "record_stream", counted("Tensor.record_stream", lambda *args: None)
    yield Tensor, "type", _tensor_type(Tensor.type)
    for name in _NEW:
        yield Tensor, name, takes_device(getattr(Tensor, name), f"Tensor.{name}(device=cuda)")
    for owner in (Tensor, torch.UntypedStorage, torch.TypedStorage):
        yield owner, "pin_memory", counted(f"{owner.__name__}.pin_memory", lambda self, *args, **kwargs: self)
    for owner in (torch.UntypedStorage, torch.TypedStorage):
        yield owner, "cuda", counted(f"{owner.__name__}.cuda", lambda self, *args, **kwargs: self)
    yield from _factories()
    yield nn.Module, "cuda", counted("Module.cuda", nn.Module.cuda)
    yield nn.Module, "to", takes_device(nn.Module.to, "Module.to(cuda)", position=1)
    yield from _types()
    yield torch, "load", _load(torch.load)
    yield torch.serialization, "load", _load(torch.load)
    default_device = _device.DeviceContext.__init__  # called by torch, so every call counts
    name = "torch.set_default_device(cuda)"
    yield _device.DeviceContext, "__init__", takes_device(default_device, name, position=1, count=count)
    yield DataLoader, "__init__", _without_pinning(DataLoader.__init__)


def _factories() -> Iterator[Replacement]:
    # torch's own list of functions that obey the default device; it is cached, so it holds the originals
    constructors = {id(function) for function in _device._device_constructors()}
    for owner in (torch, torch.fft, torch.nested):
        for name, function in list(vars(owner).items()):
            if name in _LIKE or id(function) in constructors:
                yield owner, name, takes_device(function, f"{owner.__name__}.{name}(device=cuda)")


def _types() -> Iterator[Replacement]:
    for name in _TYPES:
        yield torch.cuda, f"{name}Tensor", _stand_in(f"torch.cuda.{name}Tensor", getattr(torch, f"{name}Tensor"))
        if hasattr(torch, f"{name}Storage"):
            yield torch.cuda, f"{name}Storage", getattr(torch, f"{name}Storage")
    yield torch, "Generator", _generator(torch.Generator)
    yield torch, "set_default_tensor_type", _default_type(torch.set_default_tensor_type)


# Replacements of functions


def _tensor_cuda(
    self: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
) -> Tensor:
    count_call("Tensor.cuda")
    return self if memory_format is torch.preserve_format else self.to(memory_format=memory_format)


def _tensor_type(original: Any) -> Any:
    @functools.wraps(original)
    def type_(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(self, _cpu_type(dtype), *args, **kwargs) if dtype is not None else original(self)

    return type_


def _default_type(original: Any) -> Any:
    @functools.wraps(original)
    def set_default_tensor_type(t: Any, /) -> None:
        original(_cpu_type(t))

    return set_default_tensor_type


def _without_pinning(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.pin_memory:
            count("DataLoader(pin_memory=True)")
            self.pin_memory, self.pin_memory_device = False, ""

    return __init__


def _load(original: Any) -> Any:
    """``torch.load``, with tensors that were saved on, or are mapped to, a CUDA device placed on the CPU."""

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        def place(storage: Any, location: str) -> Any:
            if callable(map_location):
                placed = map_location(storage, location)
                return placed if placed is not None else _place_on_cpu(storage, location)
            target = map_location.get(location, location) if isinstance(map_location, dict) else map_location
            return _place_on_cpu(storage, location if target is None else target)

        if map_location is None or callable(map_location) or isinstance(map_location, dict):
            return original(f, place, *args, **kwargs)
        if names_cuda(map_location):
            count("torch.load(map_location=cuda)")
            map_location = "cpu"
        return original(f, map_location, *args, **kwargs)

    return load


def _place_on_cpu(storage: Any, location: Any) -> Any:
    """``storage``, which torch has read to the CPU, if ``location`` is CUDA; else moved to ``location`` by torch."""
    if names_cuda(location):
        count("torch.load(map_location=cuda)")
        return storage
    return torch.serialization.default_restore_location(storage, str(location))


# Replacements of classes


class _StandIn(type):
    """Metaclass of classes that create, and recognize, instances of ``cpu_class``."""

    cpu_class: Any
    path: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        count(cls.path)
        return cls.cpu_class(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.cpu_class)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.cpu_class, name)


def _stand_in(path: str, cpu_class: Any, kind: type[_StandIn] = _StandIn) -> Any:
    """A class that replaces ``path`` and whose instances are those of ``cpu_class``."""
    module, _, name = path.rpartition(".")
    return kind(name, (), {"cpu_class": cpu_class, "path": path, "__module__": module})


def _cpu_type(dtype: Any) -> Any:
    """The CPU's tensor type for one of CUDA's, given as a class or by name; anything else unchanged."""
    if isinstance(dtype, _StandIn):
        count(dtype.path)
        return dtype.cpu_class
    if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
        count(dtype)
        return dtype.replace("torch.cuda.", "torch.")
    return dtype


def _generator(cpu_class: Callable[..., Any]) -> Any:
    class Generator(_StandIn):
        def __call__(cls, device: Any = "cpu") -> Any:
            if names_cuda(device):
                count("torch.Generator(device=cuda)")
                device = "cpu"
            return cpu_class(device)

    return _stand_in("torch.Generator", cpu_class, Generator)
