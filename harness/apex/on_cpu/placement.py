"""Where the script sees each tensor: on a CUDA device or on the host.

Under CUDA a move between the two copies, and a second move does not. Scripts depend on both: a dataset is normalized
in place after ``.cuda()``, and ``.cpu()`` takes a snapshot of the weights. So the storage of every tensor that a
redirected call returns carries its place. A tensor computed from others carries none, since finding out would slow down
every operation. It is moved by copying, which is always safe, and it counts as being on CUDA once the script has put
something there: nearly everything that a training script computes comes from its model, gradients above all.

Code of torch and of this package sees that all tensors are on the CPU.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import parameter
from torch.utils._pytree import tree_map_only
from torch.utils.data import get_worker_info

from harness.apex.call_counter import is_called_by_torch
from harness.apex.on_cpu.streams import current_device
from harness.apex.patches import Replacement

Stored = Tensor | torch.UntypedStorage | torch.TypedStorage
StoredT = TypeVar("StoredT", bound=Stored)
Device = str | torch.device | int

HOST = -1
_PLACE, _PINNED = "_harness_apex_place", "_harness_apex_pinned"  # attributes of a torch.UntypedStorage

_TRUE_DEVICE = torch.UntypedStorage.device.__get__  # before it is replaced


class CudaUse:
    """How this process has used CUDA. One instance, ``cuda_use``."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start as a process that has not used CUDA."""
        self.default_place: int | None = HOST  # of tensors that are made without naming a device; None if unknown
        self.has_begun = False  # it has put a tensor there


cuda_use = CudaUse()


def replacements() -> Iterator[Replacement]:
    """Yield (owner, attribute, replacement) of everything that this module redirects."""
    yield Tensor, "is_cpu", _answer(Tensor.is_cpu, lambda place: place == HOST)
    for owner in (Tensor, torch.UntypedStorage, torch.TypedStorage):
        yield owner, "is_cuda", _answer(owner.is_cuda, lambda place: place != HOST)
        yield owner, "device", _answer(owner.device, _device)
        yield owner, "get_device", _answer(owner.get_device, lambda place: place, is_method=True)
        yield owner, "is_pinned", lambda self, *args, **kwargs: getattr(_storage(self), _PINNED, False)


def names_cuda(device: object) -> bool:
    """Return True if ``device`` means a CUDA device: "cuda", "cuda:1", torch.device("cuda", 1), or its number."""
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def place_of(device: Device) -> int | None:
    """Return the index of a CUDA device, HOST for the CPU, None for devices of other kinds."""
    if names_cuda(device):
        index = device if isinstance(device, int) else torch.device(device).index
        return current_device() if index is None else index
    return HOST if torch.device(device).type == "cpu" else None


def recorded_place(value: Stored) -> int | None:
    """Return the place that a redirected call gave to ``value``; None if it came out of other operations."""
    return getattr(_storage(value), _PLACE, None)


def assumed_place(value: Stored) -> int:
    """Return the place at which a script sees ``value``."""
    place = recorded_place(value)
    if place is None:
        place = current_device() if cuda_use.has_begun and get_worker_info() is None else HOST
    return place


def record_place(value: StoredT, place: int | None) -> StoredT:
    """Record that ``value``, which is new or was moved, is at ``place``; return it."""
    storage = _storage(value)
    if storage is not None and place is not None:
        setattr(storage, _PLACE, place)
        cuda_use.has_begun |= place != HOST
    return value


def move(tensor: Tensor, place: int | None) -> Tensor:
    """Return ``tensor`` if it is at ``place``, else a copy there, with strides and autograd history as in a copy to
    CUDA."""
    if place is None or recorded_place(tensor) == place:
        return tensor
    return tensor if parameter.is_lazy(tensor) else record_place(tensor.clone(), place)


def move_all(values: Any) -> Any:
    """Return ``values`` with each tensor in it moved to the current device."""
    return tree_map_only(Tensor, lambda tensor: move(tensor, current_device()), values)


def copy_to_pinned(value: Stored) -> Stored:
    """Return a copy of ``value`` in what the script takes for pinned memory; itself if it is there already."""
    if getattr(_storage(value), _PINNED, False):
        return value
    copy = record_place(value.clone(), HOST)
    if (storage := _storage(copy)) is not None:
        setattr(storage, _PINNED, True)
    return copy


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Return True if both are views of one storage."""
    storage = _storage(one)
    return storage is not None and storage is _storage(other)


def _storage(value: Any) -> torch.UntypedStorage | None:
    """Return the storage of a tensor in host memory; None for sparse, meta and wrapped tensors."""
    if isinstance(value, torch.TypedStorage):
        return value._untyped_storage
    if not isinstance(value, Tensor) or parameter.is_lazy(value):
        return value if isinstance(value, torch.UntypedStorage) else None
    try:
        storage = value.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return storage if _TRUE_DEVICE(storage).type == "cpu" else None


def device_of(value: Stored) -> torch.device:
    """Return the device on which a script sees ``value``."""
    return _device(assumed_place(value))


def _device(place: int) -> torch.device:
    return torch.device("cpu") if place == HOST else torch.device("cuda", place)


def _answer(original: Any, for_script: Any, is_method: bool = False) -> Any:
    """Return a property, or a method, that returns the value for the assumed place to scripts, and that of ``original``
    to all other code."""

    def answer(self: Any) -> Any:
        if is_called_by_torch() or _storage(self) is None:
            return original(self) if is_method else original.__get__(self)
        return for_script(assumed_place(self))

    return functools.wraps(original)(answer) if is_method else property(answer)


os.register_at_fork(after_in_child=cuda_use.reset)  # CUDA cannot be used in a forked process
