"""The arithmetic of batch norm over ranks, on any device and backend, with kernels that torch has for CPU and CUDA.

One collective in the forward pass gathers each rank's mean, variance and count, and one in the backward pass adds up
two sums per channel. Statistics are at least float32 and merged by count (Chan, Golub and LeVeque 1979), so batches may
differ in size between ranks, or be empty on some. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from harness.apex.dtypes import wide


@torch.no_grad()
def global_statistics(x: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance ``(channels,)`` of ``x`` ``(batch, channels, ...)`` over ``group``, count ``()``.

    They are float32, or float64 for float64 ``x``; if the count is 0 they are nan. All ranks of ``group`` call it.
    """
    channels, world = x.shape[1], dist.get_world_size(group)
    dtype = wide(x)
    mine = torch.zeros(2 * channels + 1, dtype=dtype, device=x.device)
    if x.numel() > 0:
        # The kernel computes in the dtype of the running statistics it is given; these are only for that.
        scratch = mine[: 2 * channels].view(2, channels).clone() if dtype is not x.dtype else (None, None)
        mean, var = torch.batch_norm_update_stats(x, scratch[0], scratch[1], 0.0)
        torch.cat([mean, var, mine.new_full((1,), x.numel() // channels)], out=mine)
    gathered = mine.new_empty(world * len(mine))
    dist.all_gather_into_tensor(gathered, mine, group=group)
    means, variances, counts = gathered.view(world, -1).split([channels, channels, 1], dim=1)
    count = counts.sum()
    shares = counts / count
    mean = (shares * means).sum(0)
    var = (shares * (variances + (means - mean).square())).sum(0)
    return mean, var, count


@torch.no_grad()
def update_running_statistics(module: _BatchNorm, mean: Tensor, var: Tensor, count: Tensor) -> None:
    """Update the running statistics of ``module``, if it has them, from the ``global_statistics`` of a batch."""
    running_mean, running_var, seen = module.running_mean, module.running_var, module.num_batches_tracked
    if running_mean is None or running_var is None:
        return
    factor: Tensor | float = 0.0 if module.momentum is None else module.momentum
    if seen is not None:
        seen.add_(1)
        if module.momentum is None:
            factor = seen.reciprocal().to(running_mean.dtype)
    unbiased = var * (count / (count - 1))
    running_mean.lerp_(mean.to(running_mean.dtype), factor)
    running_var.lerp_(unbiased.to(running_var.dtype), factor)


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    eps: float,
    group: Any,
) -> Tensor:
    """Return ``(x - mean) / sqrt(var + eps) * weight + bias`` in the dtype of ``x``, given its ``global_statistics``.

    The gradient of ``x`` includes that every rank's loss depends on it through the statistics; those of ``weight`` and
    ``bias`` are of this rank's loss alone. All ranks of ``group`` must run the backward pass if any does.
    """
    result: Tensor = _Normalize.apply(x, weight, bias, mean, var, count, eps, group)
    return result


class _Normalize(torch.autograd.Function):
    """``normalize`` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        eps: float,
        group: Any,
    ) -> Tensor:
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        shift = None if bias is None else bias.to(mean.dtype)
        ctx.save_for_backward(x, scale, mean, var, count)
        ctx.eps, ctx.group = eps, group
        ctx.dtypes = weight.dtype if weight is not None else None, bias.dtype if bias is not None else None
        return functional.batch_norm(x, mean, var, scale, shift, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, mean, var, count = ctx.saved_tensors
        channels, inverse_std = len(mean), (var + ctx.eps).rsqrt()
        sums = mean.new_zeros(2 * channels)
        if x.numel() > 0:
            grad = grad.contiguous(memory_format=_memory_format(x))  # else the kernels take a slow path
            _, times_x, plain = torch.ops.aten.native_batch_norm_backward(
                grad, x, scale, None, None, mean, inverse_std, True, ctx.eps, [False, True, True]
            )
            torch.cat([times_x, plain], out=sums)
        local = sums.clone()
        # Even if x needs no gradient: that may differ between ranks, and all must run the collective.
        dist.all_reduce(sums, group=ctx.group)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _input_gradient(grad, x, mean, var, ctx.eps, scale * inverse_std, sums / count)
        grad_weight, grad_bias = (
            piece.to(dtype) if dtype is not None else None
            for piece, dtype in zip(local.split(channels), ctx.dtypes, strict=True)
        )
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _input_gradient(
    grad: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float, slope: Tensor, averages: Tensor
) -> Tensor:
    """Return ``slope * (grad - average of grad - normalized x * average of (grad * normalized x))``."""
    times_x, plain = (-slope * average for average in averages.split(len(mean)))
    rest = functional.batch_norm(x, mean, var, times_x, plain, False, 0.0, eps)
    slopes = slope.view(1, -1, *[1] * (x.dim() - 2))
    return rest.addcmul_(grad, slopes)


def _memory_format(x: Tensor) -> torch.memory_format:
    for dims, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=memory_format):
            return memory_format
    return torch.contiguous_format
