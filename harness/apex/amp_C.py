"""Multi-tensor operations with the names and signatures of Apex's extension ``amp_C``, on torch's foreach kernels.

All take ``(chunk_size, noop_flag, tensor_lists, ...)`` and are usually called through ``multi_tensor_applier``. The
chunk size has no effect. ``noop_flag``, a tensor of one element, is set to 1 if an inf or NaN is found and never reset;
there is no host sync. Arithmetic is in float32 or wider; the lists may mix devices and dtypes.

The optimizers' kernels do not exist as functions; the optimizers are in ``optimizers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["multi_tensor_axpby", "multi_tensor_l2norm", "multi_tensor_scale", "multi_tensor_unscale_l2norm"]

TensorLists = Sequence[Sequence[Tensor]]


def __getattr__(name: str) -> Any:
    if not name.startswith("multi_tensor_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(
        f"amp_C.{name} is not provided, only {', '.join(__all__)}. Use an optimizer class instead: "
        "from apex.optimizers import FusedAdam, FusedSGD, FusedLAMB, FusedNovoGrad, FusedAdagrad."
    )


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """``out = x * scale`` for ``tensor_lists = [xs, outs]``, which may be the same list. Every x is checked."""
    xs, outs = _lists(tensor_lists, "multi_tensor_scale", 2)
    for indices in _indices_by_kind(xs, outs):
        scaled = _scaled([xs[i] for i in indices], scale, noop_flag)
        torch._foreach_copy_([outs[i] for i in indices], scaled)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """``out = a * x + b * y`` for ``tensor_lists = [xs, ys, outs]``.

    ``arg_to_check`` selects the tensors to check for inf and NaN: 0 the xs, 1 the ys, -1 both.
    """
    if arg_to_check not in (-1, 0, 1):
        raise ValueError(f"arg_to_check is {arg_to_check!r}; allowed are 0 (check x), 1 (check y) and -1 (check both).")
    xs, ys, outs = _lists(tensor_lists, "multi_tensor_axpby", 3)
    for indices in _indices_by_kind(xs, ys, outs):
        sums = _scaled([xs[i] for i in indices], a, None if arg_to_check == 1 else noop_flag)
        added = _scaled([ys[i] for i in indices], b, None if arg_to_check == 0 else noop_flag)
        torch._foreach_add_(sums, added)
        torch._foreach_copy_([outs[i] for i in indices], sums)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """The Euclidean norm over all of ``tensor_lists = [xs]``, shape ``(1,)``, and the norm of each x.

    The second has shape ``(len(xs),)``, or ``(0,)`` without ``per_tensor``. Both are float32 (float64 if an x is), on
    the flag's device.
    """
    (xs,) = _lists(tensor_lists, "multi_tensor_l2norm", 1)
    each = l2_norms(xs, noop_flag.device)
    total = torch.linalg.vector_norm(each).reshape(1)
    noop_flag.masked_fill_(~total.isfinite().to(noop_flag.device).reshape(()), 1)
    return total, each if per_tensor else each.new_empty(0)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    inv_scale: Tensor | float,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Like ``multi_tensor_l2norm``, for ``x * inv_scale``. The tensors are not changed."""
    total, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    factor = torch.as_tensor(inv_scale, device=total.device).abs().reshape(())
    return total * factor, each * factor


def l2_norms(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The Euclidean norm of each of ``tensors``, accumulated in float32 or wider, as one vector on ``device``."""
    found: list[Tensor] = [torch.empty(0)] * len(tensors)
    for indices in _indices_by_kind(tensors):
        dtype = _wide(tensors[indices[0]])
        norms = torch._foreach_norm([tensors[i] for i in indices], 2, dtype=dtype)
        for i, norm in zip(indices, torch.stack(norms).to(device, non_blocking=True).unbind(), strict=True):
            found[i] = norm
    return torch.stack(found) if found else torch.zeros(0, device=device)


def _lists(tensor_lists: TensorLists, name: str, number: int) -> list[list[Tensor]]:
    lengths = [len(tensors) for tensors in tensor_lists]
    if len(lengths) != number or len(set(lengths)) > 1:
        raise RuntimeError(
            f"{name} takes {number} list(s) of equal length; got {len(lengths)} of length {lengths}. "
            f"Call multi_tensor_applier(amp_C.{name}, noop_flag, [list, ...], ...)."
        )
    return [list(tensors) for tensors in tensor_lists]


def _indices_by_kind(*lists: Sequence[Tensor]) -> list[list[int]]:
    """The indices of the lists, grouped by the tensors' device and dtype, because kernels take one kind per call."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, tensors in enumerate(zip(*lists, strict=True)):
        groups.setdefault(tuple((t.device, t.dtype) for t in tensors), []).append(i)
    return list(groups.values())


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _scaled(tensors: list[Tensor], scale: float, noop_flag: Tensor | None) -> list[Tensor]:
    """``tensors`` (of one kind) times ``scale``, as new tensors. Sets ``noop_flag`` if one holds an inf or NaN."""
    scaled = [torch.empty_like(tensor, dtype=_wide(tensor)) for tensor in tensors]
    torch._foreach_copy_(scaled, tensors)
    factor = 1.0
    if noop_flag is not None:
        device, dtype = scaled[0].device, scaled[0].dtype
        factor = scale if dtype is torch.float32 else 1.0  # the kernel's factor is float32, too coarse for float64
        found_inf = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(scaled, found_inf, torch.full((), factor, device=device))
        noop_flag.masked_fill_((found_inf != 0).to(noop_flag.device), 1)
    if factor != scale:
        torch._foreach_mul_(scaled, scale)
    return scaled
