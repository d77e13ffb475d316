"""What ranks must agree on before they exchange gradients: the same tensors, with rank 0's values."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def broadcast_from_rank_zero(tensors: Sequence[Tensor]) -> None:
    """Copy rank 0's values of ``tensors`` to all ranks, in flat pieces by device and dtype. All ranks call it.

    Raises RuntimeError, on every rank, if number, shapes or dtypes of ``tensors`` differ between ranks.
    """
    if dist.get_world_size() == 1 or not tensors:
        return
    check_alike(tensors)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for group in groups.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        dist.broadcast(flat, src=0)
        for tensor, piece in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.detach().copy_(piece.view(tensor.shape))


def check_alike(tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError, on every rank, if number, shapes or dtypes of ``tensors`` differ between ranks.

    All ranks call it, each with at least one tensor. Without it a difference would show as a hang.
    """
    shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    elements = sum(tensor.numel() for tensor in tensors)
    mine = torch.tensor([len(tensors), elements, zlib.crc32(repr(shapes).encode())], device=tensors[0].device)
    extremes = torch.cat([mine, -mine])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    most, least = extremes[:3].tolist(), (-extremes[3:]).tolist()
    if most != least:
        raise RuntimeError(
            f"Ranks do not hold the same tensors: rank {dist.get_rank()} has {len(tensors)} tensors with {elements} "
            f"elements; over all ranks there are {least[0]} to {most[0]} tensors with {least[1]} to {most[1]} elements"
            f"{', of other shapes or dtypes' if most[:2] == least[:2] else ''}. Build the same model on every rank."
        )
