"""``ParameterBatch``: parameters for one kernel call, and helpers that give tensors the dtype and layout it needs.

All arithmetic is in the *wide* dtype: float32 for float16 and bfloat16 parameters, else the parameter's own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.apex.dtypes import wide

Group = dict[str, Any]  # of ``param_groups``: "params", and by name the options of their update, "step" among them
_IN_CACHE = 1 << 18  # elements: 1 MiB of weights


class ParameterBatch(NamedTuple):
    """Parameters of one group with the same device and dtype, ready for the kernels.

    ``weights`` are the tensors to compute on: the parameters themselves, their masters, or wide copies that are written
    back. Every gradient and moment has the dtype and the strides of its weight, because torch's fused kernels walk
    through memory without looking at strides.
    """

    params: list[Tensor]
    weights: list[Tensor]
    grads: list[Tensor]

    @property
    def device(self) -> torch.device:
        return self.weights[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype


def cache_sized(batch: ParameterBatch) -> Iterator[ParameterBatch]:
    """Yield ``batch`` in parts of consecutive parameters, for updates of several passes. On a CPU, a part stays in its
    cache between them, and temporary tensors take little memory. Elsewhere yield ``batch`` itself, for few kernels."""
    start = size = 0
    if batch.device.type == "cpu":
        for index, weight in enumerate(batch.weights):
            if size and size + weight.numel() > _IN_CACHE:
                yield ParameterBatch(*(tensors[start:index] for tensors in batch))
                start, size = index, 0
            size += weight.numel()
    yield ParameterBatch(*(tensors[start:] for tensors in batch))


def weight_buffer(param: Tensor) -> Tensor:
    """Return ``param``, or an empty wide tensor for it if it is narrow or its memory has gaps."""
    dense = param.is_contiguous() or torch.empty_like(param, device="meta").stride() == param.stride()
    return param if dense and param.dtype is wide(param) else torch.empty_like(param, dtype=wide(param))


def fitting(tensor: Tensor, weight: Tensor) -> Tensor:
    """Return ``tensor``, or an empty one for it if its dtype or strides are not those of ``weight``."""
    fits = tensor.dtype is weight.dtype and tensor.stride() == weight.stride()
    return tensor if fits else torch.empty_like(weight)


def copied_where_new(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    """Return ``new``, after copying the old values into every tensor that is not the old one itself."""
    pairs = [pair for pair in zip(old, new, strict=True) if pair[0] is not pair[1]]
    if pairs:
        torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])
    return new
