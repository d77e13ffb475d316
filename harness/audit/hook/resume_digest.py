"""Short digests of what a training script computes: equal bits have equal digests."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_CHUNK = 1 << 22  # elements that a device digests at a time
_FIRST, _SECOND = 0x9E3779B97F4A7C1, 0xD6E8FEB86659FD9  # odd, below 2**60
_MOST_ITEMS, _DEPTH = 20_000, 12
_TRUE_DEVICE = torch._C._TensorBase.device.__get__  # harness.apex --device cpu tells scripts another
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Parts(list[Any]):
    """Digests that become one digest of all of them."""


def text(data: Any) -> str:
    return _sha1(data if isinstance(data, bytes) else str(data).encode()).hexdigest()[:16]


def _sha1(data: bytes) -> Any:
    return hashlib.sha1(data, usedforsecurity=False)  # the quickest one here


def tensor(value: Tensor) -> Any:
    """Return the digest of a tensor's bits, type and shape: a text or, on another device than the CPU, an integer
    there, for which nothing waits until ``resolve``."""
    try:
        return _tensor(value)
    except (RuntimeError, NotImplementedError, TypeError):  # a fake, functional or nested tensor
        return f"unreadable {value.dtype}"


def _tensor(value: Tensor) -> Any:
    value = value.detach()
    if hasattr(value, "to_local"):  # the part of a DTensor on this rank
        value = value.to_local()
    if value.layout is torch.sparse_coo:
        value = value.coalesce()
        return Parts([_tensor(value.indices()), _tensor(value.values())])
    if value.is_quantized:
        value = value.int_repr()
    value = value.resolve_conj().resolve_neg().contiguous()
    kind = f"{value.dtype}{tuple(value.shape)}"
    device = _TRUE_DEVICE(value).type
    if device == "meta":
        return kind
    if device != "cpu":
        return Parts([kind, _on_device(value)])
    num_bytes = value.numel() * value.element_size()
    digest = _sha1(kind.encode())
    if num_bytes:
        digest.update((ctypes.c_char * num_bytes).from_address(value.data_ptr()))
    return str(digest.hexdigest()[:16])


def _on_device(value: Tensor) -> Tensor:
    """Return an integer of all bits and their places. Integer sums have one result in any order."""
    if value.is_complex():
        value = torch.view_as_real(value)
    flat = value.reshape(-1).view(_INTEGERS[value.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, flat.numel(), _CHUNK):
        part = flat[first : first + _CHUNK].to(torch.int64)
        place = torch.arange(first + 1, first + 1 + part.numel(), device=part.device)
        mixed = (part + place * _FIRST) * _SECOND
        mixed = (mixed ^ (mixed >> 29)) * _FIRST
        total = total + (mixed ^ (mixed >> 32)).sum()
    return total


def resolve(record: Any) -> Any:
    """Return ``record`` with texts in the place of digests on devices and of Parts. It waits for each device once."""
    waiting: list[Tensor] = []
    _collect(record, waiting)
    values: dict[int, int] = {}
    for device in {each.device for each in waiting}:
        here = [each for each in waiting if each.device == device]
        values.update(zip(map(id, here), torch.stack(here).tolist()))  # noqa: B905  Python 3.9
    return _replaced(record, values)


def _collect(record: Any, found: list[Tensor]) -> None:
    if isinstance(record, Tensor):
        found.append(record)
    elif isinstance(record, dict):
        for each in record.values():
            _collect(each, found)
    elif isinstance(record, list):
        for each in record:
            _collect(each, found)


def _replaced(record: Any, values: Mapping[int, int]) -> Any:
    if isinstance(record, Tensor):
        return f"{values[id(record)] & (2**64 - 1):016x}"
    if isinstance(record, dict):
        return {key: _replaced(each, values) for key, each in record.items()}
    if isinstance(record, Parts):
        return text("|".join(_replaced(each, values) for each in record))
    if isinstance(record, list):
        return [_replaced(each, values) for each in record]
    return record


def nested(value: Any) -> tuple[Any, int]:
    """Return (digest of the tensors and plain values in nested data, number of rows: the first size of its first
    tensor)."""
    parts, rows = Parts(), 0
    for key, item in flatten(value):
        if isinstance(item, Tensor):
            rows = rows or (len(item) if item.dim() else 1)
            parts += [key, tensor(item)]
        elif isinstance(item, (str, int, float, bool, bytes)):
            parts += [key, text(item)]
    return parts, rows


def flatten(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (place, item) of everything in nested containers and plain objects, such as a namespace of arguments."""
    if depth > _DEPTH:
        return
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, Mapping):
        for key, item in list(value.items())[:_MOST_ITEMS]:
            yield from flatten(item, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, (list, tuple)):
        if len(value) > 64 and not any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in value):
            yield name, text(repr(value))
            return
        for index, item in enumerate(value[:_MOST_ITEMS]):
            yield from flatten(item, f"{name}[{index}]", depth + 1)
    elif isinstance(value, (Tensor, str, int, float, bool, bytes)) or value is None:
        yield name, value
    elif isinstance(value, (set, frozenset)):
        yield name, text(sorted(map(repr, value)))
    elif type(value).__module__ == "numpy":
        yield name, text(repr(value.tolist())) if hasattr(value, "tolist") else repr(value)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        for key, item in list(vars(value).items())[:_MOST_ITEMS]:
            yield from flatten(item, f"{name}.{key}" if name else key, depth + 1)


def content(value: Any) -> dict[str, Any]:
    """Return {place: digest of a tensor, or plain value} of what is saved in a checkpoint."""
    found: dict[str, Any] = {}
    for name, item in flatten(value):
        if isinstance(item, Tensor):
            found[name] = Parts(["tensor", tensor(item)])
        elif isinstance(item, bytes) or (isinstance(item, str) and len(item) > 200):
            found[name] = text(item)
        else:
            found[name] = plain(item)
    return found


def plain(value: Any) -> Any:
    """Return a value that JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
