"""Half-precision models with float32 batch norm, and master weights kept by the script (contract 1.1, 6.1).

``fp16_optimizer`` does this automatically; the levels of ``amp`` do more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from harness.apex.amp.model_casts import cast_model, cast_module, cast_tree
from harness.apex.tensor_groups import flatten, unflatten

clip_grad_norm = nn.utils.clip_grad_norm_
convert_module = cast_module


class tofp16(nn.Module):
    """Casts a floating tensor, or all in a container, to float16."""

    def forward(self, input: Any) -> Any:
        return cast_tree(input, torch.float16)


class FP16Model(nn.Module):
    """``network`` in float16 except for its affine batch norms; casts floating inputs to float16, and no outputs.

    ``network`` is converted in place and available as ``.network``.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        named = {name: cast_tree(value, torch.float16) for name, value in named.items()}
        return self.network(*(cast_tree(value, torch.float16) for value in inputs), **named)


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Return ``network``, converted in place by ``convert_network``, behind a cast of its input to float16.

    Batch norm keeps its float32 values; Apex rounded them to float16 on the way.
    """
    return nn.Sequential(tofp16(), convert_network(network, torch.float16))


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast ``network`` to ``dtype`` in place, except for batch norms with affine parameters, and return it."""
    cast_model(network, dtype, keep_batchnorm_fp32=True)
    return network


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Cast the affine batch norms in ``module``, at any depth, to float32 in place, and return it."""
    for each in module.modules():
        if isinstance(each, _BatchNorm) and each.affine:
            each.float()
    return module


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (model_params, master_params): the trainable parameters of ``model``, float32 copies for an optimizer.

    With ``flat_master`` the copies are one flat parameter, alone in its list; the parameters must then be of one dtype.
    """
    model_params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not flat_master:
        return model_params, [nn.Parameter(parameter.detach().float().clone()) for parameter in model_params]
    dtypes = {parameter.dtype for parameter in model_params}
    if len(dtypes) != 1:
        raise ValueError(
            f"flat_master=True takes trainable parameters of one dtype; found {sorted(map(str, dtypes)) or 'none'}. "
            "Use flat_master=False."
        )
    return model_params, [nn.Parameter(flatten([parameter.detach() for parameter in model_params]).float())]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of ``model_params`` to those of ``master_params``, in their dtype; both lists match.

    The master of a parameter without gradient gets none, or zeros where the master is flat.
    """
    if flat_master:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        master_params[0].grad = flatten(gradients).to(master_params[0].dtype)
        return
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    for parameter, master in zip(model_params, master_params, strict=True):
        if parameter.grad is None:
            master.grad = None
        elif parameter.grad.is_sparse:
            master.grad = parameter.grad.to(master.dtype, copy=True)
        else:
            if master.grad is None or master.grad.is_sparse:
                master.grad = torch.empty_like(master)
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
        for parameter, piece in zip(model_params, unflatten(master_params[0], model_params), strict=True):
            parameter.copy_(piece)
    elif model_params:
        torch._foreach_copy_(list(model_params), list(master_params))


def to_python_float(value: Any) -> float:
    """Return the number in a one-element tensor, sequence or number. Waits for the device."""
    if isinstance(value, int | float):
        return value
    number: float = value.item() if hasattr(value, "item") else value[0]
    return number
