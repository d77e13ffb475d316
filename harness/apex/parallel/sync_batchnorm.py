"""``SyncBatchNorm``: batch norm over the batches of all ranks, and the conversion of models to it (contract 5.3).

Differences from Apex: it works on the CPU; unequal batches, ``momentum=None`` and ``track_running_stats=False`` work on
every device; evaluation never communicates.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from harness.apex.parallel.batch_norm_over_ranks import global_statistics, normalize, update_running_statistics


class SyncBatchNorm(_BatchNorm):
    """Batch norm of ``(batch, num_features, ...)`` input whose training statistics cover ``process_group``.

    In training every rank of the group must call it, equally often and in the same order, and run the backward pass if
    any does; a rank's batch may be empty. In evaluation, and without a group or in a group of one, it is plain batch
    norm. Parameter gradients are those of this rank's batch alone: DistributedDataParallel averages them. The result
    has the dtype and memory format of the input, whatever the dtype of the parameters.

    Args:
        num_features: number of channels.
        eps, momentum, affine, track_running_stats: as in ``torch.nn.BatchNorm2d``.
        process_group: ranks to share statistics with; None is all of them. See ``create_syncbn_process_group``.
        channel_last: the channels are the last dimension of the input, not the second: ``(batch, ..., num_features)``.
        fuse_relu: apply ReLU to the result.

    Raises ValueError, on every rank, if there is only one value per channel over all ranks.
    """

    # class attributes, because modules unpickled from Apex's checkpoints may lack them
    process_group: Any = None
    channel_last: bool = False
    fuse_relu: bool = False
    # set by a strategy of training while this rank's rows only keep it in step: they are normalized, but not counted
    idle: bool = False

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
        # rows of channels: the layout of channel_last, and one that the kernels of batch norm take
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
                f"SyncBatchNorm({channels}, channel_last={self.channel_last}) takes input of shape {expected}; got "
                f"{tuple(input.shape)}. With channel_last=True the channels are the last dimension, as in Apex; for "
                "input in torch.channels_last memory format leave it False."
            )

    def _world_size(self) -> int:
        """Return the number of ranks to share statistics with now."""
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return 1
        size = dist.get_world_size(self.process_group)
        if size < 1:
            raise ValueError(
                f"Rank {dist.get_rank()} is not in the process group of this SyncBatchNorm. Give each rank the "
                "group it belongs to: parallel.create_syncbn_process_group(group_size)."
            )
        return size

    def _synchronized(self, x: Tensor) -> Tensor:
        """Normalize ``x``, rows of channels, with the statistics of all ranks. Collective."""
        mean, var, count = global_statistics(x.detach()[:0] if self.idle else x.detach(), self.process_group)
        if x.numel() <= x.shape[1]:  # only then can the total be below two; else nothing is read from the device
            total = int(count)
            if total == 1:
                raise ValueError(
                    "SyncBatchNorm needs more than 1 value per channel over all ranks in training, but there is only 1 "
                    f"(input of this rank: {tuple(x.shape)}). Use a larger batch, or .eval()."
                )
            if total == 0:
                return super().forward(x)  # empty everywhere: leaves the running statistics alone
        if self.track_running_stats:
            update_running_statistics(self, mean, var, count)
        rows = x.detach().requires_grad_(x.requires_grad) if self.idle else x
        out = normalize(rows, self.weight, self.bias, mean, var, count, self.eps, self.process_group)
        return out + x * 0 if self.idle else out  # not in the statistics: no gradient through them, but x in the graph

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, channel_last={self.channel_last}, fuse_relu={self.fuse_relu}"

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Copy the module; the copy uses the same process group, which cannot be copied."""
        memo[id(self.process_group)] = self.process_group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replace every batch norm in ``module``, torch's SyncBatchNorm included, by ``SyncBatchNorm``; return the result.

    Containers are changed in place; a new object is returned only if ``module`` itself is a batch norm. Call it before
    creating the optimizer, ``amp.initialize`` and DistributedDataParallel, because weights and biases are copies.
    Running statistics are shared with the old modules. Mode, ``requires_grad``, dtype, device, hooks (with their
    handles) and names in the state dict carry over; a batch norm used in two places stays one. Instance norm is left
    alone.

    Raises TypeError for a lazy batch norm that has not seen its input yet. Warns about a subclass with its own forward,
    which is lost.
    """
    return _convert(module, process_group, channel_last, {}, {})


def create_syncbn_process_group(group_size: int) -> Any:
    """Return this rank's group of ``group_size`` consecutive ranks, or None, meaning all ranks, for 0.

    All ranks must call it, in the same order relative to other groups. Raises ValueError if ``group_size`` does not
    divide the number of ranks.
    """
    if group_size == 0:
        return None
    world = dist.get_world_size()
    if group_size < 0 or world % group_size:
        allowed = [size for size in range(1, world + 1) if world % size == 0]
        raise ValueError(
            f"group_size={group_size} does not divide the number of ranks ({world}). Use 0 (all ranks "
            f"together) or one of {', '.join(map(str, allowed))}."
        )
    blocks = [list(range(start, start + group_size)) for start in range(0, world, group_size)]
    groups = [dist.new_group(block) for block in blocks]  # every rank must take part in creating every group
    return groups[dist.get_rank() // group_size]


def _convert(
    module: nn.Module, group: Any, channel_last: bool, seen: dict[nn.Module, nn.Module], copies: dict[Any, nn.Parameter]
) -> nn.Module:
    """Return ``module`` converted, and note it in ``seen``, from which a module used in two places comes back."""
    if module in seen:
        return seen[module]
    if isinstance(module, _BatchNorm):
        seen[module] = _replacement(module, group, channel_last, copies)
        return seen[module]
    seen[module] = module
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _convert(child, group, channel_last, seen, copies)
    return module


def _replacement(old: _BatchNorm, group: Any, channel_last: bool, copies: dict[Any, nn.Parameter]) -> SyncBatchNorm:
    """Return a ``SyncBatchNorm`` with the state of ``old``; ``copies`` has the copy of each parameter made so far."""
    if isinstance(old, nn.modules.lazy.LazyModuleMixin) and old.has_uninitialized_params():  # type: ignore[misc]
        raise TypeError(
            f"the number of channels of {type(old).__name__} is not known yet. Run the model once on a batch, then "
            "call convert_syncbn_model."
        )
    if not type(old).forward.__module__.startswith(("torch.", SyncBatchNorm.__module__)):
        warnings.warn(
            f"convert_syncbn_model replaces a module of type {type(old).__name__}; its own forward is lost. If it "
            "does more than batch norm, convert that module's children instead, or derive it from "
            "parallel.SyncBatchNorm."
        )
    new = SyncBatchNorm(
        old.num_features,
        old.eps,
        old.momentum,
        old.affine,
        old.track_running_stats,
        group,
        channel_last,
        getattr(old, "fuse_relu", False),
        device="meta",  # all tensors are replaced below
    )
    for name, parameter in old._parameters.items():
        if parameter is not None and parameter not in copies:
            copies[parameter] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        new._parameters[name] = None if parameter is None else copies[parameter]
    new._buffers.update(old._buffers)
    new.training = old.training
    for name, value in vars(old).items():  # the dictionaries themselves, so that a handle can still remove its hook
        if "_hook" in name:
            setattr(new, name, value)
    return new
