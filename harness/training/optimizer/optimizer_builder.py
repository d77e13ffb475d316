"""Build the optimizer of a run, and start its state."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn

from harness.config import signatures
from harness.config.schema import OptimizerSection
from harness.errors import ConfigError, OwnCodeError, place_of, users_line
from harness.training.optimizer import registry
from harness.training.optimizer.registry import class_name
from harness.training.strategies.sharding import local

_FUSED = ("sgd", "adam", "adamw")  # whose fused kernels take all dtypes, on CPU and CUDA


def scaled_lr(section: OptimizerSection, global_batch: int) -> float:
    """Peak learning rate for ``global_batch`` rows per step.

    linear: Goyal et al., https://arxiv.org/abs/1706.02677; sqrt: Krizhevsky, https://arxiv.org/abs/1404.5997.
    """
    if section.lr_scaling == "none" or section.lr_base_batch is None:
        return section.lr
    ratio = global_batch / section.lr_base_batch
    return section.lr * (ratio if section.lr_scaling == "linear" else math.sqrt(ratio))


def build(
    section: OptimizerSection, params: Iterable[nn.Parameter] | list[dict[str, Any]], lr: float
) -> torch.optim.Optimizer:
    """Return the optimizer of ``section`` over ``params``, parameters or groups of them. Raises ConfigError."""
    make = registry.find(section.name)
    settings = {key: value for key in ("momentum", "weight_decay") if (value := getattr(section, key)) is not None}
    given: dict[str, Any] = {"lr": lr, **section.args, **settings}
    trained: list[Any] = list(params)
    if _can_be_fused(section, trained):
        given["fused"] = True
    decayed = ["weight_decay"] if any(group.weight_decay is not None for group in section.groups) else []
    parameters = {key: parameter for key, parameter in inspect.signature(make).parameters.items() if key != "params"}
    require = partial(signatures.require_parameters, section.name, parameters)
    require(section.args, "optimizer.args")
    for key in settings:
        require([key], f"optimizer.{key}", f"; to leave it out, set optimizer.{key}=null")
    require(["lr", *decayed], "optimizer")
    if "." not in section.name:
        _require_types(section, make)
    try:
        optimizer: torch.optim.Optimizer = make(trained, **given)
    except (TypeError, ValueError) as error:
        where = users_line(error) or "optimizer"
        raise ConfigError(f"cannot build {section.name}: {error}", where=where) from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = f"{section.name} returns an object of type {type(optimizer).__name__}, not a torch.optim.Optimizer"
        raise ConfigError(what, where="optimizer.name", hint="return a torch.optim.Optimizer from it")
    if inspect.unwrap(optimizer.step) is torch.optim.Optimizer.step:
        hint = "define step(self, closure=None), which updates the parameters from their gradients"
        raise OwnCodeError(f"{section.name} has no step()", where=place_of(type(optimizer)), hint=hint)
    return optimizer


def start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Start the momentum of torch's fused SGD at zero, which changes no update without dampening. Call after
    ``amp.initialize``.

    torch starts it at the first gradient, and its fused kernel fails where some parameters have momentum and others get
    their first gradient now: after a layer is unfrozen, or in a branch that is not taken in every step.
    """
    for group in optimizer.param_groups if class_name(optimizer) == "SGD" else ():
        if group.get("fused") and group["momentum"]:
            for param in group["params"]:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.zero_grad()``, without torch's entry in the profiler, which costs 10 us, where it is torch's own."""
    if "zero_grad" in vars(optimizer) or type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


def _require_types(section: OptimizerSection, make: Any) -> None:
    """Raise ConfigError for an argument of another type than ``make``, an optimizer of torch or Apex, declares. Few of
    them look: the text "no" counts as true, and other values fail in the first step."""
    for key, parameter in inspect.signature(make, eval_str=True).parameters.items():
        if key not in section.args or key == "params":
            continue
        declared = TypeAdapter(parameter.annotation, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
        try:
            declared.validate_json(json.dumps(section.args[key]))  # of which a list may be a tuple
        except ValidationError:
            kind, example = inspect.formatannotation(parameter.annotation), parameter.default
            if example is None and "bool" in kind:
                example = True
            raise ConfigError(
                f"{section.name} takes a value of type {kind}, not {section.args[key]!r}",
                where=f"optimizer.args.{key}",
                hint=f"for example {key}: {json.dumps(example)}",
            ) from None


def _can_be_fused(section: OptimizerSection, params: Sequence[Any]) -> bool:
    """Return True if one kernel can update all ``params``, and the arguments choose nothing else.

    On a CPU the last bit of a fused update depends on the place of an element in its tensor, so that a shard would be
    updated differently from the whole. ``start_momentum`` needs SGD without dampening.
    """
    tensors = [tensor for one in params for tensor in (one["params"] if isinstance(one, dict) else [one])]
    fits = all(tensor.is_floating_point() and (tensor.is_cuda or local(tensor) is tensor) for tensor in tensors)
    chosen = section.args.keys() & {"fused", "foreach", "capturable", "differentiable", "dampening"}
    return section.name in _FUSED and fits and not chosen
