"""Lists of tensors: sorted so that one fused kernel or one flat buffer can take them, and their norms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.apex.dtypes import wide

TensorLists = Sequence[Sequence[Tensor]]
_ROW = 4096  # elements that may be summed in a row in float32: the error is then about 1e-7


def by_device_and_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return ``tensors`` in lists of one device and dtype each, in the order in which the kinds first appear."""
    listed = list(tensors)
    return [[listed[i] for i in indices] for indices in indices_by_kind(listed)]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return one vector with all elements of ``tensors``, which have one dtype and device."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views into the vector ``flat`` with the shapes of ``like``, one after the other."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def checked_lists(tensor_lists: TensorLists, name: str, *numbers: int) -> list[list[Tensor]]:
    """Return the lists given to ``amp_C.NAME``. Raises RuntimeError if their number or their lengths are wrong."""
    lengths = [len(tensors) for tensors in tensor_lists]
    if len(lengths) not in numbers or len(set(lengths)) > 1:
        raise RuntimeError(
            f"{name} takes {' or '.join(map(str, numbers))} list(s) of equal length; got lists of lengths "
            f"{lengths}. Call multi_tensor_applier(amp_C.{name}, noop_flag, [list, ...], ...)."
        )
    return [list(tensors) for tensors in tensor_lists]


def indices_by_kind(*lists: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the lists, grouped by the tensors' device and dtype: kernels take one kind per call."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, tensors in enumerate(zip(*lists, strict=True)):
        groups.setdefault(tuple((t.device, t.dtype) for t in tensors), []).append(i)
    return list(groups.values())


def elements(vector: Tensor, indices: Sequence[int]) -> Tensor:
    """Return ``vector[indices]``, without the wait for the copy of a list of indices to the device."""
    return vector if list(indices) == list(range(len(vector))) else torch.stack([vector[i] for i in indices])


def one_for_each(values: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the elements of the vector ``values``, each in a form in which a foreach kernel combines it with its
    tensor.

    ``tensors`` have one device and dtype. On a CPU these are scalars. Elsewhere scalars would make foreach fall back to
    a kernel for each tensor, so each is spread out over a dense tensor of the same strides.
    """
    scalars = list(values.unbind())
    if values.device.type == "cpu" or any(_extent(tensor) > tensor.numel() for tensor in tensors):
        return scalars
    sizes = [tensor.numel() for tensor in tensors]
    scalars = list(values.to(tensors[0].dtype).unbind())
    flat = torch.cat([scalar.expand(size) for scalar, size in zip(scalars, sizes, strict=True)])
    pieces = zip(flat.split(sizes), tensors, strict=True)
    return [piece.as_strided(tensor.shape, tensor.stride(), piece.storage_offset()) for piece, tensor in pieces]


def _extent(tensor: Tensor) -> int:
    """Return the number of elements of memory from the first to the last element."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def norms(tensors: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> Tensor:
    """Return the norm of each of ``tensors`` (not empty; one device and dtype), computed in ``dtype``, as a vector.

    On the CPU torch adds the squares of a whole tensor in float32, an error of 0.1 % for 30 million elements. Here
    large tensors are added row by row. The kernels of CUDA do so themselves.
    """
    if tensors[0].device.type != "cpu" or order == math.inf:
        return torch.stack(torch._foreach_norm(list(tensors), order, dtype))
    short = [_norms_of_rows(each, order, dtype) if each.numel() > _ROW else each for each in tensors]
    return torch.stack(torch._foreach_norm(short, order, dtype))


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm over all of ``tensors``, of any devices and dtypes, on the device of the first."""
    kinds = by_device_and_dtype(tensors)
    each = [norms(kind, dtype=wide(kind[0])).to(kinds[0][0].device, non_blocking=True) for kind in kinds]
    return torch.linalg.vector_norm(torch.cat(each))


def _norms_of_rows(tensor: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    """Return the norm of each ``_ROW`` elements of ``tensor``, and of the rest."""
    flat = tensor.reshape(-1)
    rest = flat.numel() % _ROW
    if not rest:
        return torch.linalg.vector_norm(flat.view(-1, _ROW), order, dim=1, dtype=dtype)
    rows = torch.linalg.vector_norm(flat[:-rest].view(-1, _ROW), order, dim=1, dtype=dtype)
    return torch.cat([rows, torch.linalg.vector_norm(flat[-rest:], order, dtype=dtype).reshape(1)])
