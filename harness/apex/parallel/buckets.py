"""Flat buffers in which gradients cross the ranks.

A bucket is a fixed set of parameters of one device and dtype, with a persistent flat buffer: the gradients, then one
flag a parameter that says whether this rank has something to reduce for it. The flags travel with the data, so ranks
whose unused parameters differ agree without a message of their own: a parameter is reduced if any rank flags it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Scaling:
    """What gradients are multiplied by on their way: ``before`` the sum over ranks and ``after`` it.

    ``carry`` is what an amount that all ranks already agree on must be multiplied by to come out of a reduction
    unchanged: 1 when averaging, ``predivide / world_size`` when summing (contract 5.1.5).
    """

    def __init__(self, world_size: int, average: bool, predivide: float) -> None:
        self.before = 1.0 / predivide
        self.after = predivide / world_size if average else 1.0
        self.carry = 1.0 if average else predivide / world_size


class Bucket:
    """Gradients of ``parameters`` reduced together. ``indices`` are their places in the reducer's list."""

    def __init__(self, indices: Sequence[int], parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.indices = list(indices)
        self.parameters = list(parameters)
        self.dtype = dtype
        self.missing = len(self.indices)  # of the backward pass under way
        self.work: Any = None
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._flags: Tensor | None = None

    @property
    def flat(self) -> Tensor:
        """The buffer, gradients only."""
        assert self._flat is not None
        return self._flat[: -len(self.parameters)]

    def launch(self, gradients: Sequence[Tensor | None], flagged: Sequence[bool], scaling: Scaling) -> None:
        """Copy in and start the sum over ranks. ``flagged`` or not, a gradient that exists contributes.

        An unflagged one was reduced before: it is the same on all ranks, and should come out as it went in.
        """
        flat = self._buffer()
        present = [(view, g) for view, g in zip(self._views, gradients, strict=True) if g is not None and g is not view]
        if len(present) < len(self._views):
            for view, gradient in zip(self._views, gradients, strict=True):
                if gradient is None:
                    view.zero_()
        if present:
            torch._foreach_copy_([view for view, _ in present], [g.detach() for _, g in present])
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
        """Wait for the sum; return (place in this bucket, sum) of every parameter some rank flagged.

        Sums are views of ``flat``, good until the next ``launch``. Reads the flags back from the device only when this
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
        return self._flat


def layout(
    parameters: Sequence[Tensor],
    order: Sequence[int],
    min_elements: int,
    fp32: bool,
    triggers: Sequence[Tensor] | None = None,
) -> list[Bucket]:
    """Buckets over ``parameters`` taken in ``order``.

    A bucket of a kind closes at ``min_elements``, or behind each of ``triggers`` where these are given.
    """
    done: list[Bucket] = []
    filling: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    elements: dict[tuple[torch.device, torch.dtype], int] = {}
    ends = None if triggers is None else {id(parameter) for parameter in triggers}

    def close(kind: tuple[torch.device, torch.dtype]) -> None:
        indices = filling.pop(kind)
        done.append(Bucket(indices, [parameters[i] for i in indices], comm_dtype(kind[1], fp32)))

    for i in order:
        kind = (parameters[i].device, parameters[i].dtype)
        filling.setdefault(kind, []).append(i)
        elements[kind] = elements.get(kind, 0) + parameters[i].numel()
        if elements[kind] >= min_elements if ends is None else id(parameters[i]) in ends:
            close(kind)
            elements[kind] = 0
    for kind in list(filling):
        close(kind)
    return done


def comm_dtype(dtype: torch.dtype, fp32: bool) -> torch.dtype:
    """The dtype in which gradients of ``dtype`` are summed."""
    return torch.float32 if fp32 and dtype in (torch.float16, torch.bfloat16) else dtype
