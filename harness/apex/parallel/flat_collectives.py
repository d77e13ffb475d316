"""Collectives over lists of tensors, through one flat vector per dtype.

Scripts that reduce or broadcast without a wrapper import these from ``apex.parallel.distributed``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return one vector with all elements of ``tensors``, which have one dtype and device."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views into the vector ``flat`` with the shapes of ``like``, one after the other."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


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
