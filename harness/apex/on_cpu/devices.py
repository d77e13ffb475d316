"""Names of CUDA devices and types, and the calls that take them: tensor methods, factory functions, modules, files.

``rows`` is the list of what is replaced. Not here: ``torch.cuda`` itself, and what training scripts build on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _device

from harness.apex.on_cpu.count import note, note_call

Row = tuple[Any, str, Any]

_LIKE = ["empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like", "normal"]
_NEW = ["new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"]
_TYPES = ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]


def names_cuda(device: Any) -> bool:
    """Whether ``device`` means a CUDA device: "cuda", "cuda:1", torch.device("cuda", 1), or its number."""
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def rows() -> Iterator[Row]:
    """(owner, attribute, replacement) of everything redirected here."""
    yield from _tensor_rows()
    yield from _factory_rows()
    yield from _module_rows()
    yield from _storage_rows()
    yield from _type_rows()
    yield torch, "load", _load(torch.load)
    yield torch.serialization, "load", _load(torch.serialization.load)
    yield _device.DeviceContext, "__init__", _default_device(_device.DeviceContext.__init__)


def _tensor_rows() -> Iterator[Row]:
    yield Tensor, "cuda", _tensor_cuda
    yield Tensor, "to", _takes_device(Tensor.to, "Tensor.to", first=True)
    yield Tensor, "pin_memory", _unchanged("Tensor.pin_memory")
    yield Tensor, "record_stream", _nothing("Tensor.record_stream")
    yield Tensor, "type", _tensor_type(Tensor.type)
    for name in _NEW:
        yield Tensor, name, _takes_device(getattr(Tensor, name), f"Tensor.{name}")


def _factory_rows() -> Iterator[Row]:
    constructors = _device._device_constructors()  # kept by torch for its default device; made before we replace them
    for owner in (torch, torch.fft, torch.nested):
        for name, function in list(vars(owner).items()):
            if name in _LIKE or (isinstance(function, Callable) and _is_in(function, constructors)):  # type: ignore[arg-type]
                yield owner, name, _takes_device(function, f"{owner.__name__}.{name}")


def _is_in(function: Any, constructors: set[Any]) -> bool:
    return any(function is each for each in constructors)


def _module_rows() -> Iterator[Row]:
    yield nn.Module, "cuda", _counted(nn.Module.cuda, "Module.cuda")
    yield nn.Module, "to", _takes_device(nn.Module.to, "Module.to", first=True)


def _storage_rows() -> Iterator[Row]:
    for owner in (torch.UntypedStorage, torch.TypedStorage):
        yield owner, "cuda", _unchanged(f"{owner.__name__}.cuda")
        yield owner, "pin_memory", _unchanged(f"{owner.__name__}.pin_memory")


def _type_rows() -> Iterator[Row]:
    for name in _TYPES:
        yield torch.cuda, f"{name}Tensor", stand_in(f"torch.cuda.{name}Tensor", getattr(torch, f"{name}Tensor"))
        if hasattr(torch, f"{name}Storage"):
            yield torch.cuda, f"{name}Storage", getattr(torch, f"{name}Storage")
    yield torch, "Generator", _generator(torch.Generator)
    yield torch, "set_default_tensor_type", _default_type(torch.set_default_tensor_type)


# What stands in for functions


def _takes_device(original: Any, name: str, first: bool = False) -> Any:
    """``original`` with a CUDA ``device=``, or ``first`` argument, turned into the CPU."""
    counted = f"{name}(device=cuda)" if not first else f"{name}(cuda)"

    @functools.wraps(original)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and names_cuda(kwargs["device"]):
            note_call(counted)
            kwargs["device"] = "cpu"
        elif first and len(args) > 1 and names_cuda(args[1]):
            note_call(counted)
            args = (args[0], "cpu", *args[2:])
        return original(*args, **kwargs)

    return on_cpu


def _tensor_cuda(
    self: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
) -> Tensor:
    note_call("Tensor.cuda")
    return self if memory_format is torch.preserve_format else self.to(memory_format=memory_format)


def _counted(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        note_call(name)
        return original(*args, **kwargs)

    return counted


def _unchanged(name: str) -> Any:
    def unchanged(self: Any, *args: Any, **kwargs: Any) -> Any:
        note_call(name)
        return self

    return unchanged


def _nothing(name: str) -> Any:
    def nothing(*args: Any, **kwargs: Any) -> None:
        note_call(name)

    return nothing


def _tensor_type(original: Any) -> Any:
    @functools.wraps(original)
    def type_(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(self, host_type(dtype), *args, **kwargs) if dtype is not None else original(self)

    return type_


def _default_type(original: Any) -> Any:
    @functools.wraps(original)
    def set_default_tensor_type(t: Any, /) -> None:
        original(host_type(t))

    return set_default_tensor_type


def _default_device(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, device: Any) -> None:
        if names_cuda(device):
            note("torch.set_default_device(cuda)")
            device = "cpu"
        original(self, device)

    return __init__


def _load(original: Any) -> Any:
    """``torch.load`` that leaves on the CPU what was saved from, or is mapped to, a CUDA device."""

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        def place(storage: Any, location: str) -> Any:
            if callable(map_location):
                placed = map_location(storage, location)
                return placed if placed is not None else _cpu_for(storage, location)
            target = map_location.get(location, location) if isinstance(map_location, dict) else map_location
            return _cpu_for(storage, location if target is None else target)

        if map_location is None or callable(map_location) or isinstance(map_location, dict):
            return original(f, place, *args, **kwargs)
        if names_cuda(map_location):
            note("torch.load(map_location=cuda)")
            map_location = "cpu"
        return original(f, map_location, *args, **kwargs)

    return load


def _cpu_for(storage: Any, location: Any) -> Any:
    """``storage``, which torch has read to the CPU, if it belongs on CUDA; else what ``location`` means to torch."""
    if names_cuda(location):
        note("torch.load(map_location=cuda)")
        return storage
    return torch.serialization.default_restore_location(storage, str(location))


# What stands in for classes


class _StandIn(type):
    """Class of classes that make, and recognise, instances of ``host``."""

    host: Any
    spoken: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        note(cls.spoken)
        return cls.host(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.host)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.host, name)


def stand_in(spoken: str, host: Any) -> Any:
    """A class in the place of ``spoken`` whose instances are those of ``host``."""
    return _StandIn(spoken.rpartition(".")[2], (), {"host": host, "spoken": spoken, "__module__": "torch.cuda"})


def host_type(dtype: Any) -> Any:
    """The CPU's tensor type for one of CUDA's, as a class or by name; anything else as it is."""
    if isinstance(dtype, _StandIn):
        note(dtype.spoken)
        return dtype.host
    if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
        note(dtype)
        return dtype.replace("torch.cuda.", "torch.")
    return dtype


def _generator(host: Any) -> Any:
    class Generator(_StandIn):
        def __call__(cls, device: Any = "cpu") -> Any:
            if names_cuda(device):
                note("torch.Generator(device=cuda)")
                device = "cpu"
            return host(device)

    return Generator("Generator", (), {"host": host, "spoken": "torch.Generator", "__module__": "torch"})
