"""``SyncBatchNorm``: batch norm over the batches of all ranks (contract 5.3). Turning models over is in ``conversion``.

One collective forward (each rank's mean, variance and count are gathered) and one backward (two sums per channel), on
any device and backend. Statistics are float32 at least, merged by count (Chan, Golub and LeVeque 1979), so batches may
differ in size between ranks, or be empty on some.

Differences to Apex: the CPU is a device like any other; unequal batches, ``momentum=None`` and
``track_running_stats=False`` work everywhere; evaluation never communicates.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorm(_BatchNorm):
    """Batch norm of ``(batch, num_features, ...)`` input whose training statistics cover ``process_group``.

    In training every rank of the group must call it, equally often and in the same order, and run the backward pass if
    any does; a rank may come with an empty batch. In evaluation, and where there is no group or a group of one, it is
    plain batch norm. Parameter gradients are those of this rank's batch alone: DistributedDataParallel averages them.
    The result has the dtype and memory format of the input, whatever the dtype of the parameters.

    Args:
        num_features: number of channels.
        eps, momentum, affine, track_running_stats: as in ``torch.nn.BatchNorm2d``.
        process_group: ranks to share statistics with; None is all of them. See ``create_syncbn_process_group``.
        channel_last: the channels are the last dimension of the input, not the second: ``(batch, ..., num_features)``.
        fuse_relu: apply ReLU to the result.

    Raises ValueError, on every rank, if there is but one value per channel over all ranks.
    """

    # modules unpickled from Apex's checkpoints may come without
    process_group: Any = None
    channel_last: bool = False
    fuse_relu: bool = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def _specify_process_group(self, process_group: Any) -> None:
        self.process_group = process_group

    def _specify_channel_last(self, channel_last: bool) -> None:
        self.channel_last = channel_last

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Normalize ``input``; then add ``z``, of the same shape, if given; then ReLU under ``fuse_relu``."""
        self._check_input_dim(input)
        # rows of channels: the layout of channel_last, and one that batch norm's kernels know
        x = input.reshape(-1, self.num_features) if self.channel_last else input
        out = (self._synchronized(x) if self._world_size() > 1 else super().forward(x)).view(input.shape)
        if z is not None:
            out = out.add_(z)
        return functional.relu_(out) if self.fuse_relu else out

    def _check_input_dim(self, input: Tensor) -> None:
        channels = self.num_features
        if input.dim() < 2 or input.shape[-1 if self.channel_last else 1] != channels:
            expected = f"(batch, ..., {channels})" if self.channel_last else f"(batch, {channels}, ...)"
            raise ValueError(
                f"SyncBatchNorm({channels}, channel_last={self.channel_last}) takes input of shape {expected}; seen "
                f"{tuple(input.shape)}. With channel_last=True the channels are the last dimension, as in Apex; for "
                "input in torch.channels_last memory format leave it False."
            )

    def _world_size(self) -> int:
        """Number of ranks to share statistics with, as things are now."""
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return 1
        size = dist.get_world_size(self.process_group)
        if size < 1:
            raise ValueError(
                f"Rank {dist.get_rank()} is not in the process group of this SyncBatchNorm. Give each rank a group it "
                "belongs to: parallel.create_syncbn_process_group(group_size)."
            )
        return size

    def _synchronized(self, x: Tensor) -> Tensor:
        mean, var, count = global_statistics(x.detach(), self.process_group)
        if x.numel() <= x.shape[1]:  # only then can the total be less than two; else nothing is read from the device
            total = int(count)
            if total == 1:
                raise ValueError(
                    "SyncBatchNorm needs more than 1 value per channel over all ranks when training, and there is 1 "
                    f"(input of this rank: {tuple(x.shape)}). Use a larger batch, or .eval()."
                )
            if total == 0:
                return super().forward(x)  # empty everywhere: leaves the running statistics alone
        if self.track_running_stats:
            self._update_running(mean, var, count)
        result: Tensor = _Normalize.apply(x, self.weight, self.bias, mean, var, count, self.eps, self.process_group)
        return result

    @torch.no_grad()
    def _update_running(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        running_mean, running_var, seen = self.running_mean, self.running_var, self.num_batches_tracked
        if running_mean is None or running_var is None:
            return
        factor: Tensor | float = 0.0 if self.momentum is None else self.momentum
        if seen is not None:
            seen.add_(1)
            if self.momentum is None:
                factor = seen.reciprocal().to(running_mean.dtype)
        unbiased = var * (count / (count - 1))
        running_mean.lerp_(mean.to(running_mean.dtype), factor)
        running_var.lerp_(unbiased.to(running_var.dtype), factor)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, channel_last={self.channel_last}, fuse_relu={self.fuse_relu}"

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """A copy synchronizes with the same group: a process group cannot be copied."""
        memo[id(self.process_group)] = self.process_group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


@torch.no_grad()
def global_statistics(x: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance ``(channels,)`` of ``x`` ``(batch, channels, ...)`` over ``group``; the count ``()``.

    float32, or float64 for float64 ``x``. All ranks of ``group`` call it; for a count of 0 the others are nan.
    """
    channels, world = x.shape[1], dist.get_world_size(group)
    dtype = torch.promote_types(x.dtype, torch.float32)
    mine = torch.zeros(2 * channels + 1, dtype=dtype, device=x.device)
    if x.numel() > 0:
        # The kernel takes the dtype it computes in from the running statistics. These are scratch.
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


class _Normalize(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias``, where mean and var are those of ``x`` over ``group``.

    The gradient of ``x`` takes in that every rank's loss depends on it through them.
    """

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
            grad = grad.contiguous(memory_format=_memory_format(x))  # or the kernels take their slow way
            _, times_x, plain = torch.ops.aten.native_batch_norm_backward(
                grad, x, scale, None, None, mean, inverse_std, True, ctx.eps, [False, True, True]
            )
            torch.cat([times_x, plain], out=sums)
        local = sums.clone()
        # Not only where x needs a gradient: that may differ between ranks, and all must come here.
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
    """``slope * (grad - average of grad - normalized x * average of (grad * normalized x))``."""
    if x.numel() == 0:
        return torch.zeros_like(x)
    times_x, plain = (-slope * average for average in averages.split(len(mean)))
    rest = functional.batch_norm(x, mean, var, times_x, plain, False, 0.0, eps)
    slopes = slope.view(1, -1, *[1] * (x.dim() - 2))
    return torch.addcmul(rest, grad, slopes).to(x.dtype)


def _memory_format(x: Tensor) -> torch.memory_format:
    for dims, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=memory_format):
            return memory_format
    return torch.contiguous_format
