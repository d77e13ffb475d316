"""Flat buffers in which gradients are summed over ranks.

A bucket is a fixed set of parameters of one device and dtype, with a persistent flat buffer: the gradients, then one
flag per parameter, nonzero if this rank has something to reduce for it. The flags are summed with the data, so ranks
whose unused parameters differ need no extra collective: a parameter is reduced if any rank flags it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from harness.apex.dtypes import REDUCED

Strides = tuple[int, ...]
_GLOO_PIECE = 1_000_000  # elements: one piece is copied while another is being sent
_CUDA_PIECE = 25 << 20  # bytes, as in torch's DistributedDataParallel: nccl reaches its bandwidth with large messages


def piece_size(tensors: Sequence[Tensor]) -> int:
    """Return the number of elements to send at once where no computation overlaps."""
    if not tensors or tensors[0].device.type == "cpu":
        return _GLOO_PIECE
    return _CUDA_PIECE // tensors[0].element_size()


def strides_in_buffer(tensors: Sequence[Tensor]) -> list[Strides]:
    """Return the strides that gradients of ``tensors`` have in a flat buffer.

    They are the tensors' own, such as channels_last, so that the copy needs no transposition. A tensor with gaps, such
    as every second column of another, has contiguous ones.
    """
    return [torch.empty_like(tensor, device="meta").stride() for tensor in tensors]


class CommonStrides:
    """The strides that gradients of all ``parameters`` of a model have in buffers, equal on all ranks.

    They are the parameters' own if these are ``alike`` on all ranks, else contiguous.
    """

    def __init__(self, parameters: Sequence[Tensor], alike: bool) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        self._strides = strides_in_buffer(parameters) if alike else []

    def by_parameter(self, parameters: Sequence[Tensor]) -> dict[Tensor, Strides]:
        """Return the strides for the ``parameters`` that the model has now.

        Returns an empty dictionary, which means contiguous gradients, if a shape has changed: one rank alone cannot
        know whether the new strides are equal on all.
        """
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


class _Buffer(NamedTuple):
    """A vector ``flat``, with a view for the gradient of each parameter, and of the flags at its end."""

    flat: Tensor
    views: list[Tensor]
    flags: Tensor


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
        self.num_missing = len(self.indices)  # gradients of the current backward pass that have not arrived
        self._work: dist.Work | None = None

    @property
    def flat(self) -> Tensor:
        """The gradients in the buffer, without the flags."""
        return self._buffer.flat[: -len(self.parameters)]

    def begin_pass(self) -> None:
        """Prepare for a backward pass, also after one that raised."""
        self._wait()
        self.num_missing = len(self.indices)

    def launch(self, gradients: Sequence[Tensor | None], flagged: Sequence[bool], scaling: Scaling) -> None:
        """Copy ``gradients``, dense or sparse, in and start the sum over ranks. Collective.

        An existing gradient contributes even if it is not ``flagged``: it was reduced before, is equal on all ranks,
        and comes out unchanged.
        """
        flat, views, flags = self._buffer
        present: list[tuple[Tensor, Tensor]] = []
        carried: list[Tensor] = []
        for view, gradient, flag in zip(views, gradients, flagged, strict=True):
            if gradient is None:
                view.zero_()
                continue
            if gradient is not view:
                present.append((view, gradient.detach() if gradient.layout is torch.strided else gradient.to_dense()))
            if not flag:
                carried.append(view)
        if present:
            torch._foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])
        if all(flagged):
            flags.fill_(1.0)
        else:
            flags.copy_(torch.tensor(flagged, dtype=self.dtype), non_blocking=True)
        if carried and scaling.carry != 1.0:
            torch._foreach_mul_(carried, scaling.carry)
        if scaling.before != 1.0:
            flat.mul_(scaling.before)
        self._work = dist.all_reduce(flat, async_op=True)

    def finish(self, flagged: Sequence[bool]) -> list[tuple[int, Tensor]]:
        """Wait for the sum that ``launch`` has started on all ranks. Returns (position in this bucket, sum) of every
        parameter that some rank flagged.

        Sums are views of ``flat``, valid until the next ``launch``. Reads the flags back from the device only if this
        rank did not flag everything.
        """
        self._wait()
        _, views, flags = self._buffer
        used = flagged if all(flagged) else (flags != 0).tolist()
        return [(place, view) for place, view in enumerate(views) if used[place]]

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None

    @functools.cached_property
    def _buffer(self) -> _Buffer:
        """The memory of this bucket, which its first reduction allocates."""
        sizes = [parameter.numel() for parameter in self.parameters]
        flat = torch.zeros(sum(sizes) + len(sizes), dtype=self.dtype, device=self.parameters[0].device)
        *pieces, flags = flat.split([*sizes, len(sizes)])
        views = [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]
        if self._strides:
            views = [view.as_strided(p.shape, self._strides[p]) for view, p in zip(views, self.parameters, strict=True)]
        return _Buffer(flat, views, flags)


def sums_over_ranks(
    buckets: Sequence[Bucket], values: Sequence[Tensor | None], scaling: Scaling
) -> Iterator[tuple[int, Tensor]]:
    """Yield (index, scaled sum over ranks) of every value that some rank has; sums are valid until the next launch.

    Collective. All sums start at the first ``next``, and each is waited for when it is yielded: iterate to the end.
    """
    flags = [[values[i] is not None for i in bucket.indices] for bucket in buckets]
    for bucket, flagged in zip(buckets, flags, strict=True):
        bucket.launch([values[i] for i in bucket.indices], flagged, scaling)
    for bucket, flagged in zip(buckets, flags, strict=True):
        for place, total in bucket.finish(flagged):
            yield bucket.indices[place], total.mul_(scaling.after)


def make_buckets(
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
        is_full = elements[kind] >= min_elements if ends is None else id(parameters[i]) in ends
        if is_full:
            closed.append(filling.pop(kind))
            elements[kind] = 0
    buckets = []
    for indices in (*closed, *filling.values()):
        dtype = parameters[indices[0]].dtype
        dtype = torch.float32 if fp32 and dtype in REDUCED else dtype
        buckets.append(Bucket(indices, [parameters[i] for i in indices], dtype, strides))
    return buckets
