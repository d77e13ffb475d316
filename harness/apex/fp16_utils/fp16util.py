"""Half-precision models with float32 batch norm, and master weights kept by hand (contract 1.1, 6.1).

The optimizer that does all this by itself is in ``fp16_optimizer``; the levels of ``amp`` do more, and better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from harness.apex.amp.casting import cast_model, cast_tree

clip_grad_norm = nn.utils.clip_grad_norm_


# Models


class tofp16(nn.Module):
    """Casts a floating tensor, or all in a container, to float16."""

    def forward(self, input: Any) -> Any:
        return cast_tree(input, torch.float16)


class FP16Model(nn.Module):
    """``network`` in float16 but for its affine batch norms, with floating inputs cast to float16; outputs stay so.

    ``network`` is converted in place, and is the attribute ``network``.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        named = {name: cast_tree(value, torch.float16) for name, value in named.items()}
        return self.network(*(cast_tree(value, torch.float16) for value in inputs), **named)


def network_to_half(network: nn.Module) -> nn.Sequential:
    """``network`` behind a cast of its input to float16, converted in place as by ``convert_network``.

    Batch norm keeps its float32 values; Apex rounded them to float16 on the way.
    """
    return nn.Sequential(tofp16(), convert_network(network, torch.float16))


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast ``network`` to ``dtype`` in place, all but batch norms with affine parameters, and return it."""
    cast_model(network, dtype, keep_batchnorm_fp32=True)
    return network


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating parameters, gradients and buffers of ``module`` itself, not of its children, in place."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point():
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if gradient is None else gradient.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Cast the affine batch norms in ``module``, at any depth, to float32 in place, and return it."""
    for each in module.modules():
        if isinstance(each, _BatchNorm) and each.affine:
            each.float()
    return module


# Master weights


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(model_params, master_params): the trainable parameters of ``model`` and float32 copies to give an optimizer.

    With ``flat_master`` the copies are one flat parameter, alone in its list; the parameters must then be of one dtype.
    """
    model_params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not flat_master:
        return model_params, [nn.Parameter(parameter.detach().float().clone()) for parameter in model_params]
    dtypes = {parameter.dtype for parameter in model_params}
    if len(dtypes) != 1:
        raise ValueError(
            f"flat_master=True takes trainable parameters of one dtype; here are {sorted(map(str, dtypes)) or 'none'}. "
            "Use flat_master=False."
        )
    return model_params, [nn.Parameter(_flat(model_params).float())]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of ``model_params`` to those of ``master_params``, in their dtype; both lists match.

    A parameter without gradient gives its master none, or zeros where the master is flat.
    """
    if flat_master:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        master_params[0].grad = _flat(gradients).to(master_params[0].dtype)
        return
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    for parameter, master in zip(model_params, master_params, strict=True):
        if parameter.grad is None:
            master.grad = None
        elif parameter.grad.is_sparse:
            master.grad = parameter.grad.to(master.dtype, copy=True)
        else:
            master.grad = torch.empty_like(master) if master.grad is None else master.grad
            sources.append(parameter.grad)
            targets.append(master.grad)
    if targets:
        torch._foreach_copy_(targets, sources)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the values of ``master_params`` to ``model_params``, in their dtype; both lists match."""
    if flat_master:
        pieces = master_params[0].split([parameter.numel() for parameter in model_params])
        for parameter, piece in zip(model_params, pieces, strict=True):
            parameter.copy_(piece.view_as(parameter))
        return
    if model_params:
        torch._foreach_copy_(list(model_params), list(master_params))


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def to_python_float(value: Any) -> float:
    """The number in a one-element tensor, sequence or number. Waits for the device."""
    if isinstance(value, int | float):
        return value
    number: float = value.item() if hasattr(value, "item") else value[0]
    return number
