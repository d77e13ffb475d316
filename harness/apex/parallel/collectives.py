"""Collectives over lists of tensors, through one flat vector per dtype, and rank 0's broadcast.

Scripts that reduce or broadcast without a wrapper import the first five functions, ``flatten`` and ``unflatten`` from
``apex.parallel.distributed``.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.apex.tensor_groups import by_device_and_dtype, flatten, unflatten


def split_by_type(tensors: Iterable[Tensor]) -> OrderedDict[str, list[Tensor]]:
    """Return ``tensors`` by ``Tensor.type()``, in the order in which the types first appear."""
    found: OrderedDict[str, list[Tensor]] = OrderedDict()
    for tensor in tensors:
        found.setdefault(tensor.type(), []).append(tensor)
    return found


def split_half_float_double(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the float16, float32, float64 and bfloat16 tensors, one list for each dtype present, in that order."""
    kept = list(tensors)
    dtypes = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
    groups = [[tensor for tensor in kept if tensor.dtype is dtype] for dtype in dtypes]
    return [group for group in groups if group]


def extract_tensors(maybe_tensor: Any, tensor_list: list[Tensor]) -> None:
    """Append the tensors in ``maybe_tensor``, a tensor or nested iterables of them, to ``tensor_list``."""
    if isinstance(maybe_tensor, Tensor):
        tensor_list.append(maybe_tensor)
        return
    for item in maybe_tensor if isinstance(maybe_tensor, Iterable) and not isinstance(maybe_tensor, str) else ():
        extract_tensors(item, tensor_list)


@torch.no_grad()
def apply_flat_dist_call(bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Run ``call(vector, *extra_args)`` on all of ``bucket`` as one vector; ``dist.all_reduce`` averages.

    All ranks call it, with tensors of the same shapes.
    """
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    for tensor, value in zip(bucket, unflatten(flat, bucket), strict=True):
        tensor.copy_(value)


def flat_dist_call(tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Run ``apply_flat_dist_call`` on ``tensors`` of each type. All ranks call it, with tensors of the same shapes."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


# The broadcast when a wrapper is constructed


def require_process_group(name: str) -> None:
    """Raise ValueError if there is no default process group, which the class ``name`` needs."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{name} needs the default process group, but none exists. Call "
            'torch.distributed.init_process_group("gloo") (or "nccl") first, under a launcher such as torchrun.'
        )


def broadcast_from_rank_zero(tensors: Sequence[Tensor]) -> bool:
    """Copy rank 0's values of ``tensors`` to all ranks, in flat pieces by device and dtype. All ranks call it.

    They may be on the CPU under nccl, expanded, and of dtypes that the backend does not know, as buffers are, which
    Apex left alone. Sparse ones are left alone here, too.

    Returns True if the strides of ``tensors`` are equal on all ranks, too. Raises RuntimeError, on every rank, if their
    number, shapes, dtypes or types of device differ between ranks.
    """
    if dist.get_world_size() == 1:
        return True
    dense = [_without_repeats(tensor) for tensor in tensors if tensor.layout is torch.strided]
    same_strides, device = _check_alike(dense), _device_for(dense)
    for group in by_device_and_dtype(dense):
        apply_flat_dist_call(group, _broadcast_bytes, (device,))
    return same_strides


def device_type() -> str:
    """Return the type of the devices whose tensors the default process group takes: "cpu" if that is one of several,
    "cuda" under nccl."""
    config = dist.get_backend_config()  # such as "cpu:gloo,cuda:nccl"
    return "cpu" if "cpu:" in config else config.partition(":")[0]


def _device_for(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device for a collective that concerns ``tensors``: that of one of them, if the group takes it."""
    return next((each.device for each in tensors if each.device.type == device_type()), torch.device(device_type()))


def _without_repeats(tensor: Tensor) -> Tensor:
    """Return the part of an expanded ``tensor`` that has memory of its own; of any other, all of it."""
    for dim in [dim for dim, stride in enumerate(tensor.stride()) if stride == 0]:
        tensor = tensor[(slice(None),) * dim + (slice(1),)]
    return tensor


def _broadcast_bytes(flat: Tensor, device: torch.device) -> None:
    """Copy rank 0's values of ``flat`` to all ranks, by way of ``device`` if the backend does not take its own."""
    own = flat.view(torch.uint8)
    sent = own if device_type() in ("cpu", flat.device.type) else own.to(device)
    dist.broadcast(sent, 0)
    own.copy_(sent)  # at once if they are the same


def _check_alike(tensors: Sequence[Tensor]) -> bool:
    """Raise RuntimeError, on every rank, if the ranks' tensors differ, which would otherwise show as a hang. Returns
    True if their strides are equal on all ranks."""
    shapes = [(tuple(tensor.shape), str(tensor.dtype), tensor.device.type) for tensor in tensors]
    strides = [tensor.stride() for tensor in tensors]
    elements = sum(tensor.numel() for tensor in tensors)
    numbers = len(tensors), elements, *(zlib.crc32(repr(each).encode()) for each in (shapes, strides))
    mine = torch.tensor(numbers, device=_device_for(tensors))
    extremes = torch.stack([mine, -mine])  # maxima and negated minima in one reduction
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    most, least = extremes[0].tolist(), (-extremes[1]).tolist()
    if most[:3] != least[:3]:
        others = f"over all ranks, {least[0]} to {most[0]} tensors with {least[1]} to {most[1]} elements"
        if most[:2] == least[:2]:
            others = "the same on all ranks, but shapes, dtypes or devices differ"
        raise RuntimeError(
            f"The ranks hold different tensors. Rank {dist.get_rank()} has {len(tensors)} with {elements} elements; "
            f"{others}. Build the same model on every rank."
        )
    return bool(most[3] == least[3])
