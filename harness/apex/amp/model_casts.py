"""Casts of whole models, of their inputs and outputs, and of their state dicts (contract 3.1, 3.4, 3.5).

Inputs and outputs are cast by forward hooks that hold a dtype and nothing else, so a deep copy or a pickle of the model
is independent of the original. ``model.forward(x)`` called directly runs no hooks: call ``model(x)``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from harness.apex.dtypes import REDUCED


def cast_tree(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with every floating tensor in it cast to ``dtype``; containers keep their type.

    Handles lists, tuples, named tuples, sets, deques, mappings, dataclass instances, and objects with a ``to`` method,
    which is called as in Apex: it casts a PackedSequence of token ids, too.
    Returns the object itself when nothing in it changes, and when its type cannot be rebuilt.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype != dtype and value.is_floating_point() else value
    if value is None or isinstance(value, str | bytes | int | float | nn.Module | type):
        return value
    if callable(getattr(value, "to", None)):
        return value.to(dtype)  # PackedSequence, a custom batch
    if isinstance(value, Mapping):
        return _cast_mapping(value, dtype)
    if isinstance(value, list | tuple | set | frozenset | deque):
        return _cast_sequence(value, dtype)
    if dataclasses.is_dataclass(value):
        return _cast_dataclass(value, dtype)
    return value


def _cast_sequence(value: Any, dtype: torch.dtype) -> Any:
    items = [cast_tree(item, dtype) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    try:
        if isinstance(value, list | deque) and type(value) is not list:
            result: Any = copy.copy(value)  # its class may have another constructor, and it may carry more than items
            for index, item in enumerate(items):
                result[index] = item
            return result
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    except TypeError:
        return value


def _cast_mapping(value: Mapping[Any, Any], dtype: torch.dtype) -> Any:
    items = {key: cast_tree(item, dtype) for key, item in value.items()}
    if all(new is value[key] for key, new in items.items()):
        return value
    try:
        result: Any = copy.copy(value)  # keeps the type and what it carries: order, a default factory, a model output
        for key, item in items.items():
            result[key] = item
    except TypeError:
        return value
    return result


def _cast_dataclass(value: Any, dtype: torch.dtype) -> Any:
    fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    changed = {name: new for name, old in fields.items() if (new := cast_tree(old, dtype)) is not old}
    result = copy.copy(value) if changed else value
    for name, new in changed.items():
        object.__setattr__(result, name, new)  # past the __setattr__ of a frozen dataclass
    return result


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook, after ``dtype``: casts positional and keyword arguments."""
    return tuple(cast_tree(arg, dtype) for arg in args), {name: cast_tree(arg, dtype) for name, arg in kwargs.items()}


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook, after ``dtype``: casts the result."""
    return cast_tree(output, dtype)


def cast_model(model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool) -> None:
    """Cast the floating parameters, their gradients and the buffers of ``model`` in place; parameters keep identity.

    With ``keep_batchnorm_fp32`` modules of the batch norm family *with affine parameters* stay as they are; the running
    statistics of one without them are cast (contract 3.1).
    """
    if not keep_batchnorm_fp32:
        # to() of a module casts complex tensors, too
        model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
        return
    for module in model.modules():
        if not (isinstance(module, _BatchNorm) and module.affine):
            cast_module(module, dtype)
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()


def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating parameters, gradients and buffers of ``module`` in place, without those of its children."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_floating_point():
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if gradient is None else gradient.to(dtype)
    for name, buffer in module._buffers.items():  # the dict itself: a buffer is replaced, not written to
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def _export_fp32(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """Replace the tensors in reduced precision that ``module`` itself has in ``state_dict`` by float32 copies."""
    for name in (*module._parameters, *module._buffers):
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.dtype in REDUCED:
            state_dict[prefix + name] = value.detach().float()


def attach(
    model: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None, fp32_state: bool
) -> list[RemovableHandle]:
    """Attach the casts to ``model`` (top level only), and with ``fp32_state`` the state-dict hook to all its modules.

    Return the handles.
    """
    handles: list[RemovableHandle] = []
    if inputs is not None:
        handles.append(model.register_forward_pre_hook(functools.partial(_cast_inputs, inputs), with_kwargs=True))
    if outputs is not None:
        handles.append(model.register_forward_hook(functools.partial(_cast_output, outputs)))
    if fp32_state:
        handles += [module.register_state_dict_post_hook(_export_fp32) for module in model.modules()]
    return handles


def floating_tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (kind, name, tensor) of every floating parameter and buffer of ``model``."""
    for kind, named in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_floating_point():
                yield kind, name, tensor
