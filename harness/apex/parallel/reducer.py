"""``Reducer``: gradients averaged over the ranks when the script calls for it (contract 5.2).

``distributed`` holds DistributedDataParallel, which averages by itself during the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.apex.parallel.buckets import Bucket, Scaling, Strides, layout, piece_size, strides_in_buffer
from harness.apex.parallel.collectives import (
    broadcast_from_rank_zero,
    require_process_group,
    sparse_parameters,
    sum_over_ranks,
)


class Reducer:
    """Averages over all ranks, at each ``reduce()``, the gradients of a module or given tensors.

    All ranks must construct it, and call ``reduce()`` equally often. Needs the default process group.

    With amp, call ``reduce()`` inside the ``scale_loss`` context, after ``backward()``. At the end of the context each
    rank checks the gradients it finds for overflow; gradients averaged later can neither correct that check nor reach
    master weights, so loss scales and weights would drift apart between ranks.

    Args:
        module_or_grads_list: a module, of which rank 0's parameters and buffers are copied to all ranks now, and
            whose trainable parameters' gradients are averaged; a gradient missing on some ranks counts as zero there,
            and stays None if no rank has one. Or tensors, in arbitrarily nested iterables, averaged in place: the same
            number and shapes on every rank. Note that ``zero_grad(set_to_none=True)``, torch's default, leads to new
            gradient tensors; pass the module then.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Any]) -> None:
        require_process_group("Reducer")
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads = [] if isinstance(module_or_grads_list, nn.Module) else list(_flatten(module_or_grads_list))
        self._scaling = Scaling(dist.get_world_size(), average=True, predivide=1.0)
        self._buckets: list[Bucket] = []
        self._laid_out: list[Tensor] = []
        self._strides: dict[int, Strides] = {}
        if self.module is not None:
            parameters = list(self.module.parameters())
            if broadcast_from_rank_zero([*parameters, *self.module.buffers()]):  # their strides are equal on all ranks
                self._strides = dict(zip(map(id, parameters), strides_in_buffer(parameters), strict=True))

    @torch.no_grad()
    def reduce(self) -> None:
        """Average now. All ranks call it."""
        if dist.get_world_size() == 1:
            return
        if self.module is None:
            for tensor, average in self._averages(self.grads, list(self.grads)):
                tensor.copy_(average)
            return
        sparse = {id(table) for table in sparse_parameters(self.module)}
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        dense: list[Tensor] = [parameter for parameter in trainable if id(parameter) not in sparse]
        for parameter, average in self._averages(dense, [parameter.grad for parameter in dense]):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(average)
        for parameter in trainable:
            if id(parameter) in sparse:
                total = sum_over_ranks(parameter.grad, parameter)
                parameter.grad = None if total is None else total * self._scaling.after

    def _averages(self, tensors: list[Tensor], values: list[Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (tensor, average of its values) wherever some rank has a value."""
        if [id(tensor) for tensor in tensors] != [id(tensor) for tensor in self._laid_out]:
            known = all(id(tensor) in self._strides for tensor in tensors)
            strides = [self._strides[id(tensor)] for tensor in tensors] if known else None
            self._buckets = layout(tensors, range(len(tensors)), piece_size(tensors), fp32=False, strides=strides)
            self._laid_out = tensors
        flags = [[values[i] is not None for i in bucket.indices] for bucket in self._buckets]
        for bucket, flagged in zip(self._buckets, flags, strict=True):
            bucket.launch([values[i] for i in bucket.indices], flagged, self._scaling)
        for bucket, flagged in zip(self._buckets, flags, strict=True):
            for place, total in bucket.finish(flagged):
                yield bucket.parameters[place], total.mul_(self._scaling.after)


def _flatten(items: Any) -> Iterator[Tensor]:
    if isinstance(items, Tensor):
        yield items
    elif isinstance(items, Iterable) and not isinstance(items, str):
        for item in items:
            yield from _flatten(item)
    else:
        raise TypeError(
            f"Reducer takes a module, or tensors in nested iterables; got an object of type {type(items).__name__}. "
            "For gradients that may be None, pass the module that they belong to."
        )
