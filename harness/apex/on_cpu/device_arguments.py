"""Replaces calls that take a CUDA device or type: tensor methods, factories, modules, files, loaders, autocast.

The namespace ``torch.cuda`` itself is in ``torch_cuda``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import autocast_mode, grad_scaler
from torch.utils import _device
from torch.utils.data import DataLoader

from harness.apex.call_counter import calling_module, count, count_call, counted, is_called_by_torch
from harness.apex.on_cpu import placement
from harness.apex.on_cpu.generators import generator_of
from harness.apex.on_cpu.placement import HOST, copy_to_pinned, names_cuda, place_of
from harness.apex.on_cpu.streams import current_device
from harness.apex.patches import Replacement, around

_LIKE = ["empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like", "normal"]
_NEW = ["new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"]
_RANDOM = ["normal", "rand", "randint", "randn", "randperm"]  # these take a generator
_SHARING = ["as_tensor", "asarray"]  # these may return their argument, or a view of it
_TYPES = ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]


def takes_device(
    original: Any,
    name: str | None,
    *,
    position: int = -1,
    keyword: str = "device",
    default: str | None = None,
    count: Callable[[str], None] = count_call,
) -> Any:
    """Return ``original`` with a CUDA device in the argument ``keyword``, or at ``position`` if not -1, made the CPU.

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
    """Yield (owner, attribute, replacement) of everything that this module redirects."""
    yield Tensor, "cuda", _tensor_cuda
    yield Tensor, "cpu", around(Tensor.cpu, _tensor_cpu)
    yield Tensor, "to", around(Tensor.to, _tensor_to)
    yield Tensor, "type", around(Tensor.type, _tensor_type)
    yield Tensor, "type_as", around(Tensor.type_as, _tensor_type_as)
    yield Tensor, "record_stream", counted("Tensor.record_stream", lambda *args: None)
    for name in _NEW:
        yield Tensor, name, _creates(getattr(Tensor, name), f"Tensor.{name}(device=cuda)", like_first=True)
    for owner in (Tensor, torch.UntypedStorage, torch.TypedStorage):
        yield (
            owner,
            "pin_memory",
            counted(f"{owner.__name__}.pin_memory", lambda self, *args: copy_to_pinned(self)),
        )
    for owner in (torch.UntypedStorage, torch.TypedStorage):
        yield owner, "cuda", counted(f"{owner.__name__}.cuda", _storage_cuda)
    yield from _factories()
    yield nn.Module, "cuda", counted("Module.cuda", nn.Module.cuda)
    yield nn.Module, "to", around(nn.Module.to, _module_to)
    yield from _types()
    yield from _autocast()
    yield torch, "load", around(torch.load, _load)
    yield torch.serialization, "load", around(torch.load, _load)
    yield _device.DeviceContext, "__init__", around(_device.DeviceContext.__init__, _device_context)
    yield DataLoader, "__init__", around(DataLoader.__init__, _without_pinning)


def _factories() -> Iterator[Replacement]:
    # torch's own list of functions that obey the default device. It is cached, and so holds the originals; but if it
    # was made while transformers loaded a model, it has a linspace of transformers.
    listed = {*_device._device_constructors(), *_device._device_constructors.__wrapped__()}
    constructors = {id(function) for function in listed}
    for owner in (torch, torch.fft, torch.nested):
        for name, function in list(vars(owner).items()):
            if name in _LIKE or id(function) in constructors:
                text = f"{owner.__name__}.{name}(device=cuda)"
                options = {"is_random": name in _RANDOM, "may_share": name in _SHARING}
                yield owner, name, _creates(function, text, like_first=name.endswith("_like"), **options)
    yield torch, "from_numpy", around(torch.from_numpy, _from_numpy)


def _types() -> Iterator[Replacement]:
    for name in _TYPES:
        yield torch.cuda, f"{name}Tensor", _stand_in(f"torch.cuda.{name}Tensor", getattr(torch, f"{name}Tensor"))
        if hasattr(torch, f"{name}Storage"):
            yield torch.cuda, f"{name}Storage", getattr(torch, f"{name}Storage")
    yield torch, "Generator", _generator(torch.Generator)
    yield torch, "set_default_tensor_type", around(torch.set_default_tensor_type, _default_type)


def _autocast() -> Iterator[Replacement]:
    """Yield the replacements of autocast and GradScaler, which use the CPU with CUDA's default dtype."""
    autocast, scaler, autocast_dtype = autocast_mode.autocast, grad_scaler.GradScaler, torch.get_autocast_dtype
    context = functools.partial(_autocast_context, default=autocast_dtype("cuda"))
    yield autocast, "__init__", around(autocast.__init__, context)
    # custom_fwd(cast_inputs=) casts the arguments of one device type with it
    yield autocast_mode, "_cast", takes_device(autocast_mode._cast, None, position=1, keyword="device_type")
    name = "torch.amp.GradScaler(cuda)"
    yield scaler, "__init__", takes_device(scaler.__init__, name, position=1, default="cuda", count=count)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        query = getattr(torch, name)
        yield torch, name, takes_device(query, None, position=0, keyword="device_type", default="cuda")
    yield torch, "get_autocast_gpu_dtype", lambda: autocast_dtype("cpu")


# Replacements of functions


def _autocast_context(
    original: Any, self: Any, device_type: str, dtype: Any = None, *args: Any, default: torch.dtype, **kwargs: Any
) -> None:
    if names_cuda(device_type):
        count("torch.autocast(cuda)")
        device_type, dtype = "cpu", dtype if dtype is not None else default
    original(self, device_type, dtype, *args, **kwargs)


def _tensor_cuda(
    self: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
) -> Tensor:
    count_call("Tensor.cuda")
    moved = placement.move(self, place_of("cuda" if device is None else device))
    return moved if memory_format is torch.preserve_format else moved.to(memory_format=memory_format)


def _storage_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    place = place_of("cuda" if device is None else device)
    return self if placement.recorded_place(self) == place else placement.record_place(self.clone(), place)


def _tensor_cpu(original: Any, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = original(self, *args, **kwargs)
    return result if _is_internal() else placement.move(result, HOST)


def _tensor_to(original: Any, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    target = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if target is None or isinstance(target, torch.dtype):
        return original(self, *args, **kwargs)  # type: ignore[no-any-return]
    if names_cuda(target):
        count_call("Tensor.to(cuda)")
        args, kwargs = (("cpu", *args[1:]), kwargs) if args else ((), {**kwargs, "device": "cpu"})
    result: Tensor = original(self, *args, **kwargs)
    if _is_internal() and not names_cuda(target):
        return result
    return _at(self, result, placement.assumed_place(target) if isinstance(target, Tensor) else place_of(target))


def _tensor_type(original: Any, self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is None:
        name: str = original(self)
        if not is_called_by_torch() and placement.assumed_place(self) != HOST:
            name = name.replace("torch.", "torch.cuda.", 1)
        return name
    result = original(self, _cpu_type(dtype), *args, **kwargs)
    return result if isinstance(dtype, torch.dtype) or _is_internal() else _at(self, result, _place_of_type(dtype))


def _tensor_type_as(original: Any, self: Tensor, other: Tensor) -> Tensor:
    return _at(self, original(self, other), placement.assumed_place(other))


def _at(before: Tensor, after: Tensor, place: int | None) -> Tensor:
    """Return ``after``, which is ``before`` converted, at ``place``; copy it unless the conversion already has."""
    if after is before or placement.shares_memory(after, before):
        return placement.move(after, place)
    return placement.record_place(after, place)


def _is_internal() -> bool:
    """Return True if code of torch called the calling function, except where it acts for a script: Module.cpu() and
    Module.to(), and the Tensor.cpu() of O1."""
    passed_on = calling_module(depth=2) in (nn.Module.__module__, "harness.apex.amp.cast_engine")
    return is_called_by_torch(depth=2) and not passed_on


def _module_to(original: Any, self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    target = args[0] if args else kwargs.get("device", kwargs.get("tensor"))
    if names_cuda(target):
        count_call("Module.to(cuda)")
    elif isinstance(target, Tensor):  # torch would read its true device
        return original(self, placement.device_of(target), target.dtype)  # type: ignore[no-any-return]
    return original(self, *args, **kwargs)  # type: ignore[no-any-return]


def _creates(
    original: Any, name: str, *, like_first: bool = False, is_random: bool = False, may_share: bool = False
) -> Any:
    """Return the factory function ``original``, with its result put where ``device`` says, else where its first
    argument is (``like_first``) or at the default place.

    ``is_random``: it draws for CUDA from CUDA's generator. ``may_share``: it may return its argument.
    """

    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None:
            place = placement.recorded_place(args[0]) if like_first and args else placement.cuda_use.default_place
        elif (place := place_of(device)) is not None and place != HOST:
            count_call(name)
            kwargs["device"] = "cpu"
            if is_random and kwargs.get("generator") is None:
                kwargs["generator"] = generator_of(place)
        result = original(*args, **kwargs)
        if may_share:
            return placement.move(result, place) if device is not None else result
        return placement.record_place(result, place)

    return create


def _from_numpy(original: Any, array: Any) -> Tensor:
    return placement.record_place(original(array), HOST)  # type: ignore[no-any-return]


def _default_type(original: Any, t: Any, /) -> None:
    original(_cpu_type(t))
    placement.cuda_use.default_place = _place_of_type(t)


def _device_context(original: Any, self: Any, device: Any) -> None:
    """Begin ``with torch.device(...)`` or ``set_default_device`` on the CPU. torch fills it in, so factory functions do
    not see the device."""
    if names_cuda(device):
        count("torch.set_default_device(cuda)")
        placement.cuda_use.default_place = None
        device = "cpu"
    original(self, device)


def _without_pinning(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if self.pin_memory:
        count("DataLoader(pin_memory=True)")
        self.pin_memory, self.pin_memory_device = False, ""


def _load(original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Do ``torch.load`` with tensors that were saved on, or are mapped to, a CUDA device placed on the CPU."""

    def place(storage: Any, location: str) -> Any:
        if callable(map_location):
            placed = map_location(storage, location)
            return placed if placed is not None else _place_storage(storage, location)
        target = map_location.get(location, location) if isinstance(map_location, dict) else map_location
        return _place_storage(storage, location if target is None else target)

    if isinstance(map_location, torch.device) and map_location.type == "meta":
        return original(f, map_location, *args, **kwargs)
    return original(f, place, *args, **kwargs)


def _place_storage(storage: Any, location: Any) -> Any:
    """Return ``storage``, which torch has read to the CPU, at ``location``; torch moves it unless that is CUDA."""
    if names_cuda(location):
        count("torch.load(map_location=cuda)")
    else:
        storage = torch.serialization.default_restore_location(storage, str(location))
    return placement.record_place(storage, place_of(location))


# Replacements of classes


class _StandIn(type):
    """The metaclass of classes that create, and recognize, instances of ``cpu_class``."""

    cpu_class: Any
    path: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        count(cls.path)
        return placement.record_place(cls.cpu_class(*args, **kwargs), current_device())

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.cpu_class) and placement.assumed_place(instance) != HOST

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.cpu_class, name)


def _stand_in(path: str, cpu_class: Any, kind: type[_StandIn] = _StandIn) -> Any:
    """Return a class that replaces ``path`` and whose instances are those of ``cpu_class``."""
    module, _, name = path.rpartition(".")
    return kind(name, (), {"cpu_class": cpu_class, "path": path, "__module__": module})


def _cpu_type(dtype: Any) -> Any:
    """Return the CPU's tensor type for one of CUDA's, given as a class or by name; anything else unchanged."""
    if isinstance(dtype, _StandIn):
        count(dtype.path)
        return dtype.cpu_class
    if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
        count(dtype)
        return dtype.replace("torch.cuda.", "torch.")
    return dtype


def _place_of_type(kind: Any) -> int:
    """Return the place that a tensor type names, given as a class or by name."""
    name = kind if isinstance(kind, str) else kind.path if isinstance(kind, _StandIn) else ""
    return current_device() if name.startswith("torch.cuda.") else HOST


def _generator(cpu_class: Callable[..., Any]) -> Any:
    """Return the class that replaces ``torch.Generator``."""

    class Generator(_StandIn):
        def __call__(cls, device: Any = "cpu") -> Any:
            if names_cuda(device):
                count("torch.Generator(device=cuda)")
                device = "cpu"
            return cpu_class(device)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, cls.cpu_class)

    return _stand_in("torch.Generator", cpu_class, Generator)
