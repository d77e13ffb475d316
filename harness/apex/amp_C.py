"""Apex's extension ``amp_C`` on torch's fused and foreach kernels: operations on lists of tensors.

All take ``(chunk_size, noop_flag, tensor_lists, ...)`` and are usually called through ``multi_tensor_applier``. The
chunk size has no effect. ``noop_flag``, a tensor of one element, is set to 1 if an inf or NaN is found and never reset;
there is no host sync. Arithmetic is in float32 or wider; the lists may mix devices and dtypes.

The updates of the optimizers are in ``optimizers.multi_tensor`` and ``optimizers.multi_tensor_lamb``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.apex.optimizers.batch import wide
from harness.apex.optimizers.multi_tensor import (
    multi_tensor_adagrad,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_novograd,
    multi_tensor_sgd,
)
from harness.apex.optimizers.multi_tensor_lamb import (
    multi_tensor_l2norm,
    multi_tensor_lamb,
    multi_tensor_lamb_mp,
    multi_tensor_lamb_stage1_cuda,
    multi_tensor_lamb_stage2_cuda,
)
from harness.apex.tensor_groups import TensorLists, checked_lists, indices_by_kind

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. It has {', '.join(__all__)}.")


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """``out = x * scale`` for ``tensor_lists = [xs, outs]``, which may be the same list. Every x is checked."""
    xs, outs = checked_lists(tensor_lists, "multi_tensor_scale", 2)
    for indices in indices_by_kind(xs, outs):
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
        raise ValueError(f"arg_to_check is {arg_to_check!r}; it must be 0 (check x), 1 (check y) or -1 (both).")
    xs, ys, outs = checked_lists(tensor_lists, "multi_tensor_axpby", 3)
    for indices in indices_by_kind(xs, ys, outs):
        sums = _scaled([xs[i] for i in indices], a, None if arg_to_check == 1 else noop_flag)
        added = _scaled([ys[i] for i in indices], b, None if arg_to_check == 0 else noop_flag)
        torch._foreach_add_(sums, added)
        torch._foreach_copy_([outs[i] for i in indices], sums)


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
    if not isinstance(inv_scale, Tensor):
        inv_scale = torch.full((), inv_scale, device=total.device)  # not as_tensor, which waits for its copy
    factor = inv_scale.to(total.device).abs().reshape(())
    return total * factor, each * factor


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Like ``multi_tensor_l2norm``, but zeros if ``noop_flag`` is set already."""
    skip = noop_flag != 0
    return tuple(  # type: ignore[return-value]
        found.masked_fill(skip.to(found.device), 0)
        for found in multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    )


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """``out = x * scale`` for ``tensor_lists = [xs, outs]``. Returns the norms of the xs, before scaling."""
    xs, outs = checked_lists(tensor_lists, "multi_tensor_l2norm_scale", 2)
    found = multi_tensor_l2norm(chunk_size, noop_flag, [xs], per_tensor)
    multi_tensor_scale(chunk_size, torch.zeros_like(noop_flag), [xs, outs], scale)
    return found


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Update a loss scale like ``torch._amp_update_scale_``, but shrink it only at the ``hysteresis``-th overflow.

    All tensors have one element; the first three are changed in place. Overflows count until a step without one.
    Returns ``current_scale``.
    """
    overflow = found_inf > 0
    hysteresis_tracker.copy_(torch.where(overflow, hysteresis_tracker - 1, hysteresis))
    tolerated = overflow & (hysteresis_tracker > 0)
    before = current_scale.clone()
    torch._amp_update_scale_(current_scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)
    current_scale.copy_(torch.where(tolerated, before, current_scale))
    normal = current_scale >= torch.finfo(current_scale.dtype).smallest_normal
    return current_scale.mul_(normal)  # Apex's kernel is compiled to flush subnormal numbers to zero


def _scaled(tensors: list[Tensor], scale: float, noop_flag: Tensor | None) -> list[Tensor]:
    """``tensors`` (of one kind) times ``scale``, as new tensors. Sets ``noop_flag`` if one holds an inf or NaN."""
    scaled = [torch.empty_like(tensor, dtype=wide(tensor)) for tensor in tensors]
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
