"""Fully sharded training (torch's FSDP2): which parts of a model are sharded, whole tensors out of shards, and back.

Nothing here knows of amp, the loop or checkpoints. A sharded tensor is a ``DTensor``; everything else passes through
unchanged, so callers need not ask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

MIN_BLOCK = 1 << 16  # numbers; a smaller block is not worth two messages of its own a pass
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def blocks(model: nn.Module, at_least: int = MIN_BLOCK) -> list[nn.Module]:
    """The parts of ``model`` that are gathered one at a time, inner before outer: elements of its containers.

    Elements of Sequential, ModuleList and ModuleDict with ``at_least`` parameters that no block inside them has taken.
    Inside an element only what is repeated there counts: the layers of an encoder, not the parts of a shortcut. An
    element whose parameters are used outside it too (tied weights) stays with the root.
    """
    uses = _uses(model)
    found: dict[nn.Module, None] = {}
    taken: set[int] = set()
    for element in _elements(model, False, False):
        left = {id(param): param.numel() for param in element.parameters() if id(param) not in taken}
        tied = any(uses[key] != count for key, count in _uses(element).items())
        if not tied and sum(left.values()) >= at_least:
            found[element] = None
            taken |= left.keys()
    return list(found)


def _uses(model: nn.Module) -> Counter[int]:
    """How many modules of ``model`` hold each parameter."""
    return Counter(id(param) for module in model.modules() for param in module.parameters(recurse=False))


def _elements(module: nn.Module, is_element: bool, in_element: bool) -> Iterator[nn.Module]:
    is_container = type(module) in _CONTAINERS
    opens = is_container and (not in_element or _repeats(module))
    in_element = in_element or (is_element and not is_container)
    for child in module.children():
        yield from _elements(child, opens, in_element)
    if is_element and not is_container:
        yield module


def _repeats(container: nn.Module) -> bool:
    kinds = [type(child) for child in container.children() if next(child.parameters(), None) is not None]
    return len(set(kinds)) < len(kinds)


def shard(model: nn.Module, device: torch.device, at_least: int = MIN_BLOCK) -> int:
    """Shard ``model`` in place over all ranks, its blocks first, then what is left; return the number of blocks.

    Rank 0's weights and buffers are everybody's. Before the optimizer is built, which then holds the shards.
    Collective; needs a process group.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    parts = blocks(model, at_least)
    for part in parts:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return len(parts)


def local(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this rank holds, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tree: Any, keep: bool) -> Any:
    """``tree`` (of dictionaries and lists) with every sharded tensor put together, on the CPU; None without ``keep``.

    One tensor at a time, so ranks that do not keep them never hold more than one. Collective where there are shards.
    """
    if isinstance(tree, DTensor):
        full = tree.full_tensor()
        return full.cpu() if keep else None
    if isinstance(tree, dict):
        return {key: whole(value, keep) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(whole(value, keep) for value in tree)
    return tree


def part_like(like: Any, value: Any) -> Any:
    """Of the whole tensor ``value``, the shard that this rank holds of ``like``, where that is sharded. No messages."""
    if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
        here = value.to(like.device)
        # a copy: what is cut from a mapped file would keep the file
        return distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None).clone()
    return value


def model_parts(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A whole state dict of ``model`` as ``model.load_state_dict`` takes it on this rank."""
    own = model.state_dict()
    return {name: part_like(own.get(name), value) for name, value in state.items()}


def optimizer_parts(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A whole state dict of ``optimizer`` as ``optimizer.load_state_dict`` takes it on this rank."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    entries = {
        index: {key: part_like(params[index], value) for key, value in entry.items()} if index < len(params) else entry
        for index, entry in state["state"].items()
    }
    return {**state, "state": entries}
