"""Conversion of a model's batch norms to ``SyncBatchNorm``, and process groups for them (contract 5.3)."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from harness.apex.parallel.sync_batchnorm import SyncBatchNorm


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
    if module in seen:
        return seen[module]
    if isinstance(module, _BatchNorm):
        seen[module] = _synchronized(module, group, channel_last, copies)
        return seen[module]
    seen[module] = module
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _convert(child, group, channel_last, seen, copies)
    return module


def _synchronized(old: _BatchNorm, group: Any, channel_last: bool, copies: dict[Any, nn.Parameter]) -> SyncBatchNorm:
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
