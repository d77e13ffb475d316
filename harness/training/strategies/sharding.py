"""Fully sharded training with torch's FSDP2: sharding a model, and converting between shards and whole tensors.

A sharded tensor is a ``DTensor``. All functions pass other values through unchanged, so callers need not check.
torch's modules for sharding are imported where they are used: that takes half as long as the import of torch.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from harness.runs.weights_file import with_versions

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from harness.runs.formats.base import Own

MIN_BLOCK = 1 << 16  # parameters; a smaller block is not worth two collectives of its own per pass
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def blocks(model: nn.Module, at_least: int = MIN_BLOCK) -> list[nn.Module]:
    """Return the submodules of ``model`` that are gathered one at a time, inner before outer.

    They are the elements of Sequential, ModuleList and ModuleDict with ``at_least`` parameters, not counting those of
    blocks inside them. Inside an element, only repeated modules become blocks: the layers of an encoder, not the parts
    of a shortcut. An element that shares parameters with the rest of the model (tied weights) stays with the root.
    """
    uses = _uses(model)
    wrapped: dict[nn.Module, None] = {}
    assigned: set[int] = set()
    for element in elements(model):
        remaining = {id(param): param.numel() for param in element.parameters() if id(param) not in assigned}
        tied = any(uses[key] != count for key, count in _uses(element).items())
        if not tied and sum(remaining.values()) >= at_least:
            wrapped[element] = None
            assigned |= remaining.keys()
    return list(wrapped)


def _uses(model: nn.Module) -> Counter[int]:
    """Return {id of a parameter: number of modules of ``model`` that hold it}."""
    return Counter(id(param) for module in model.modules() for param in module.parameters(recurse=False))


def elements(module: nn.Module, is_element: bool = False, in_element: bool = False) -> Iterator[nn.Module]:
    """Yield the elements of the containers in ``module``, inner before outer, as described in ``blocks``."""
    is_container = type(module) in _CONTAINERS
    opens = is_container and (not in_element or _repeats(module))
    in_element = in_element or (is_element and not is_container)
    for child in module.children():
        yield from elements(child, opens, in_element)
    if is_element and not is_container:
        yield module


def _repeats(container: nn.Module) -> bool:
    kinds = [type(child) for child in container.children() if next(child.parameters(), None) is not None]
    return len(set(kinds)) < len(kinds)


def shard(
    model: nn.Module, device: torch.device, at_least: int = MIN_BLOCK, param_dtype: torch.dtype = torch.float32
) -> int:
    """Shard ``model`` in place over all ranks, its blocks first, then the rest; return the number of blocks.

    ``param_dtype``: of the gathered weights, except those of batch norms. The gradients that are averaged, the shards
    and the outputs of the model stay float32.

    All ranks get rank 0's weights and buffers, one block at a time: ``device`` never holds more than the shards and one
    whole block. On rank 0 the model is on the CPU, where each block is freed when it is sharded; on the others it may
    be ``without_values``. Call it before the optimizer is built, which then holds the shards. Collective; needs a
    process group.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    holders: dict[int, list[Any]] = defaultdict(list)  # of each tensor, since a weight may be tied
    for module in model.modules():
        for entries in (module._parameters, module._buffers):
            for name, tensor in entries.items():
                holders[id(tensor)].append((entries, name))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    parts = blocks(model, at_least)
    _place(model.buffers(), device, holders)
    if param_dtype == torch.float32:
        policies = [MixedPrecisionPolicy()] * 2
    else:
        policies = [MixedPrecisionPolicy(param_dtype, torch.float32, kind) for kind in (None, torch.float32)]
        for norm in [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]:
            if norm is not model and next(norm.parameters(), None) is not None:
                _place(norm.parameters(), device, holders)
                fully_shard(norm, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    for part in parts:
        _place(part.parameters(), device, holders)
        fully_shard(part, mesh=mesh, mp_policy=policies[0])
    _place(model.parameters(), device, holders)
    fully_shard(model, mesh=mesh, mp_policy=policies[1])
    return len(parts)


def _place(tensors: Iterable[Tensor], device: torch.device, holders: Mapping[int, list[Any]]) -> None:
    """Move those of ``tensors`` that are not sharded to ``device``, with rank 0's values. Collective."""
    for tensor in [tensor for tensor in tensors if not _is_sharded(tensor)]:
        data = tensor.detach()
        data = torch.empty_like(data, device=device) if data.is_meta else data.to(device)
        dist.broadcast(data, src=0)
        if tensor.device == data.device:
            continue
        placed = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
        vars(placed).update(vars(tensor))
        for entries, name in holders[id(tensor)]:
            entries[name] = placed


@contextmanager
def without_values() -> Iterator[None]:
    """Context in which a model is built without memory for its weights and buffers: each goes to the meta device when a
    module registers it. Weights of a class of their own stay on the CPU."""
    replacements: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()  # a tied weight is registered twice

    def on_meta(module: nn.Module, name: str, tensor: Any) -> Any:
        if tensor is None or tensor.is_meta:
            return tensor
        if tensor not in replacements:
            if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
                kind: Any = type(tensor)
                replacements[tensor] = kind(tensor.requires_grad, device="meta", dtype=tensor.dtype)
            elif type(tensor) is nn.Parameter:
                replacements[tensor] = nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
            elif type(tensor) is Tensor:
                replacements[tensor] = torch.empty_like(tensor, device="meta")
            else:
                return tensor
            vars(replacements[tensor]).update(vars(tensor))
        return replacements[tensor]

    replace: Any = on_meta  # torch's annotation of hooks leaves out that they may return another tensor
    hooks = [register_module_parameter_registration_hook(replace), register_module_buffer_registration_hook(replace)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def layout(model: nn.Module) -> str:
    """Return a digest of the names, shapes and dtypes of the weights and buffers of ``model``."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    description = [(name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in tensors]
    return sha256(repr(description).encode()).hexdigest()[:12]


def replicate(model: nn.Module) -> None:
    """Give every rank the weights and buffers of rank 0. Does nothing without a process group. Collective."""
    if dist.is_initialized():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)


def _is_sharded(value: Any) -> TypeGuard[DTensor]:
    """Return True for a DTensor. There is none before their module is imported."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of ``tensor``, without a copy."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with the parts of all ranks. Collective if it is sharded."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def whole(tree: Any, keep: bool) -> Any:
    """Return ``tree`` (of dictionaries and lists) with every sharded tensor gathered on the CPU, or None without
    ``keep``.

    Gathers one tensor at a time, so ranks without ``keep`` never hold more than one. Collective if anything is sharded.
    """
    if _is_sharded(tree):
        full = tree.full_tensor()
        return full.cpu() if keep else None
    if isinstance(tree, dict):
        return {key: whole(value, keep) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(whole(value, keep) for value in tree)
    return tree


def own_shards(model: nn.Module, optimizer: torch.optim.Optimizer, average: Sequence[Tensor]) -> Own:
    """Return the function that gives, for a key of a sharded checkpoint, this rank's shard of its parameter."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = model.state_dict()

    def own(key: str, size: torch.Size) -> Tensor | None:
        top, _, path = key.partition("/")
        like: Any = None
        if top == "model":
            like = state.get(path)
        elif top == "optimizer" and (index := path.split("/")[1]).isdigit() and int(index) < len(params):
            like = params[int(index)]
        elif top == "ema" and (index := path.split("/")[-1]).isdigit() and int(index) < len(average):
            like = average[int(index)]
        return like.detach() if _is_sharded(like) and like.shape == size else None

    return own


def wrapped_like(tensor: Tensor, local_part: Tensor) -> Tensor:
    """Return ``local_part``, on the CPU, as a sharded tensor like ``tensor``, if that is one."""
    if not _is_sharded(tensor):
        return local_part
    mesh = tensor.device_mesh
    if mesh.device_type != "cpu":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return type(tensor).from_local(
        local_part, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def part_like(like: Any, value: Any) -> Any:
    """Return this rank's shard of the whole ``value`` if ``like`` is sharded, else ``value``. No communication."""
    if _is_sharded(value):
        return value
    if _is_sharded(like) and isinstance(value, Tensor) and value.shape == like.shape:
        from torch.distributed.tensor import distribute_tensor

        on_device = value.to(like.device)
        # A copy, since a slice of a memory-mapped file would keep the file open.
        return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None).clone()
    return value


def model_parts(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return a whole state dict, cut to this rank's shards for ``model.load_state_dict``."""
    own_state = model.state_dict()
    return with_versions({name: part_like(own_state.get(name), value) for name, value in state.items()}, model)


def optimizer_parts(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a whole state dict, cut to this rank's shards for ``optimizer.load_state_dict``."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    entries = {
        index: {key: part_like(params[index], value) for key, value in entry.items()} if index < len(params) else entry
        for index, entry in state["state"].items()
    }
    return {**state, "state": entries}
