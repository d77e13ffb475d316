"""The broadcast of rank 0's parameters and buffers when a wrapper is constructed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from harness.apex.parallel.flat_collectives import apply_flat_dist_call
from harness.apex.tensor_groups import by_device_and_dtype


def require_process_group(name: str) -> None:
    """Raise ValueError if there is no default process group, which the class ``name`` needs."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{name} needs the default process group, but none exists. Call "
            'torch.distributed.init_process_group("gloo") (or "nccl") first, under a launcher such as torchrun.'
        )


def broadcast_from_rank_zero(tensors: Sequence[Tensor]) -> bool:
    """Copy rank 0's values of ``tensors`` to all ranks, in flat pieces by device and dtype. All ranks call it.

    Returns True if the strides of ``tensors`` are equal on all ranks, too. Raises RuntimeError, on every rank, if their
    number, shapes or dtypes differ between ranks.
    """
    if dist.get_world_size() == 1 or not tensors:
        return True
    same_strides = _check_alike(tensors)
    for group in by_device_and_dtype(tensors):
        apply_flat_dist_call(group, dist.broadcast, (0,))
    return same_strides


def _check_alike(tensors: Sequence[Tensor]) -> bool:
    """Raise RuntimeError, on every rank, if the ranks' tensors differ, which would otherwise show as a hang. Returns
    True if their strides are equal on all ranks."""
    shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    strides = [tensor.stride() for tensor in tensors]
    elements = sum(tensor.numel() for tensor in tensors)
    numbers = len(tensors), elements, *(zlib.crc32(repr(each).encode()) for each in (shapes, strides))
    mine = torch.tensor(numbers, device=tensors[0].device)
    extremes = torch.stack([mine, -mine])  # maxima and negated minima in one reduction
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    most, least = extremes[0].tolist(), (-extremes[1]).tolist()
    if most[:3] != least[:3]:
        others = f"over all ranks, {least[0]} to {most[0]} tensors with {least[1]} to {most[1]} elements"
        if most[:2] == least[:2]:
            others = "the same on all ranks, but shapes or dtypes differ"
        raise RuntimeError(
            f"The ranks hold different tensors. Rank {dist.get_rank()} has {len(tensors)} with {elements} elements; "
            f"{others}. Build the same model on every rank."
        )
    return bool(most[3] == least[3])
