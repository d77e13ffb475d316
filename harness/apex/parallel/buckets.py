"""Flat buffers in which gradients are summed over ranks.

A bucket is a fixed set of parameters of one device and dtype, with a persistent flat buffer: the gradients, then one
flag per parameter, nonzero if this rank has something to reduce for it. The flags are summed with the data, so ranks
whose unused parameters differ need no extra collective: a parameter is reduced if any rank flags it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.apex.dtypes import REDUCED

Strides = tuple[int, ...]
_GLOO_PIECE = 1_000_000  # elements: one piece is copied while another is being sent
_CUDA_PIECE = 25 << 20  # bytes, as in torch's DistributedDataParallel: nccl reaches its bandwidth with large messages


def piece_size(tensors: Sequence[Tensor]) -> int:
    """Elements to send at once where no computation overlaps."""
    if not tensors or tensors[0].device.type == "cpu":
        return _GLOO_PIECE
    return _CUDA_PIECE // tensors[0].element_size()


def strides_in_buffer(tensors: Sequence[Tensor]) -> list[Strides]:
    """Return the strides that gradients of ``tensors`` have in a flat buffer: their own, for a copy without
    transposition."""
    return [torch.empty_like(tensor, device="meta").stride() for tensor in tensors]  # contiguous if they have gaps


class CommonStrides:
    """The strides that gradients of ``parameters``, all of a model, have in buffers: equal on all ranks.

    They are the parameters' own if these are ``alike`` on all ranks, else contiguous.
    """

    def __init__(self, parameters: Sequence[Tensor], alike: bool) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        self._strides = strides_in_buffer(parameters) if alike else []

    def of(self, parameters: Sequence[Tensor]) -> dict[Tensor, Strides]:
        """Return the strides by parameter, for the ``parameters`` that the model has now; empty, for contiguous ones,
        if a shape has changed: of the new strides one rank alone cannot know whether they are equal on all."""
        if not self._strides or [parameter.shape for parameter in parameters] != self._shapes:
            return {}
        return dict(zip(parameters, self._strides, strict=True))


class Scaling:
    """Factors for gradients ``before`` and ``after`` the sum over ranks.

    A gradient that is already equal on all ranks comes out of a reduction unchanged if it is first multiplied by
    ``carry``: 1 when averaging, ``predivide / world_size`` when summing (contract 5.1.5).
    """

    def __init__(self, world_size: int, average: bool, predivide: float) -> None:
        self.before = 1.0 / predivide
        self.after = predivide / world_size if average else 1.0
        self.carry = 1.0 if average else predivide / world_size


class Bucket:
    """Gradients of ``parameters``, reduced together. ``indices`` are their positions in the reducer's list.

    ``strides`` are those of each gradient in the buffer, equal on all ranks; contiguous by default.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[Tensor],
        dtype: torch.dtype,
        strides: Mapping[Tensor, Strides] | None = None,
    ) -> None:
        self.indices = list(indices)
        self.parameters = list(parameters)
        self.dtype = dtype
        self._strides = strides
        self.missing = len(self.indices)  # gradients of the current backward pass that have not arrived
        self.work: Any = None
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._flags: Tensor | None = None

    @property
    def flat(self) -> Tensor:
        """The gradients in the buffer, without the flags."""
        assert self._flat is not None
        return self._flat[: -len(self.parameters)]

    def launch(self, gradients: Sequence[Tensor | None], flagged: Sequence[bool], scaling: Scaling) -> None:
        """Copy ``gradients``, dense or sparse, in and start the sum over ranks.

        An existing gradient contributes even if it is not ``flagged``: it was reduced before, is equal on all ranks,
        and comes out unchanged.
        """
        flat = self._buffer()
        present = [(view, g) for view, g in zip(self._views, gradients, strict=True) if g is not None and g is not view]
        if len(present) < len(self._views):
            for view, gradient in zip(self._views, gradients, strict=True):
                if gradient is None:
                    view.zero_()
        if present:
            torch._foreach_copy_([view for view, _ in present], [_strided(g) for _, g in present])
        assert self._flags is not None
        if all(flagged):
            self._flags.fill_(1.0)
        else:
            self._flags.copy_(torch.tensor(flagged, dtype=self.dtype), non_blocking=True)
            if scaling.carry != 1.0:
                carried = [
                    v for v, flag, g in zip(self._views, flagged, gradients, strict=True) if not flag and g is not None
                ]
                if carried:
                    torch._foreach_mul_(carried, scaling.carry)
        if scaling.before != 1.0:
            flat.mul_(scaling.before)
        self.work = dist.all_reduce(flat, async_op=True)

    def finish(self, flagged: Sequence[bool]) -> list[tuple[int, Tensor]]:
        """Wait for the sum; return (position in this bucket, sum) of every parameter that some rank flagged.

        Sums are views of ``flat``, valid until the next ``launch``. Reads the flags back from the device only if this
        rank did not flag everything.
        """
        self.work.wait()
        self.work = None
        assert self._flat is not None
        assert self._flags is not None
        used = flagged if all(flagged) else (self._flags != 0).tolist()
        return [(place, view) for place, view in enumerate(self._views) if used[place]]

    def _buffer(self) -> Tensor:
        if self._flat is None:
            sizes = [parameter.numel() for parameter in self.parameters]
            device = self.parameters[0].device
            self._flat = torch.zeros(sum(sizes) + len(sizes), dtype=self.dtype, device=device)
            *pieces, self._flags = self._flat.split([*sizes, len(sizes)])
            self._views = [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]
            if self._strides:
                pairs = zip(self._views, self.parameters, strict=True)
                self._views = [view.as_strided(p.shape, self._strides[p]) for view, p in pairs]
        return self._flat


def _strided(gradient: Tensor) -> Tensor:
    """Return ``gradient`` as a dense tensor."""
    return gradient.detach() if gradient.layout is torch.strided else gradient.to_dense()


def layout(
    parameters: Sequence[Tensor],
    order: Sequence[int],
    min_elements: int,
    fp32: bool,
    triggers: Sequence[Tensor] | None = None,
    strides: Mapping[Tensor, Strides] | None = None,
) -> list[Bucket]:
    """Return buckets over ``parameters`` in ``order``, each of one device and dtype.

    A bucket is closed once it holds ``min_elements``, or after each of ``triggers`` if these are given. ``fp32``: sum
    float16 and bfloat16 gradients in float32. ``strides``: of each parameter's gradient in its buffer, equal on all
    ranks; contiguous if empty.
    """
    closed: list[list[int]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    elements: Counter[tuple[torch.device, torch.dtype]] = Counter()
    ends = None if triggers is None else {id(parameter) for parameter in triggers}
    for i in order:
        kind = (parameters[i].device, parameters[i].dtype)
        filling.setdefault(kind, []).append(i)
        elements[kind] += parameters[i].numel()
        if elements[kind] >= min_elements if ends is None else id(parameters[i]) in ends:
            closed.append(filling.pop(kind))
            elements[kind] = 0
    buckets = []
    for indices in (*closed, *filling.values()):
        dtype = parameters[indices[0]].dtype
        dtype = torch.float32 if fp32 and dtype in REDUCED else dtype
        buckets.append(Bucket(indices, [parameters[i] for i in indices], dtype, strides))
    return buckets
