"""Optimizer by name."""

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

from harness.config import plugins, signatures
from harness.config.schema import OptimizerSection
from harness.errors import ConfigError, OwnCodeError, place_of, users_line
from harness.training.strategies.sharding import local

_WITH_STATE = ("amsgrad", "centered")  # settings of torch's optimizers that keep another average from the first step
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
    make = find(section.name)
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


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of ``optimizer``, without the wrapper that LARC is."""
    return type(getattr(optimizer, "optim", optimizer)).__name__


def with_settings_of(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict ``state`` of another run, with the settings that ``optimizer`` was built with.

    A group holds both: settings are what the constructor takes and what ``trained_parameters.groups`` adds. The rest is
    state, such as the count of steps of Apex's optimizers. ``Optimizer.load_state_dict`` would take all of it from
    ``state``. Raises ValueError if a setting needs state that the other run did not have.
    """
    saved, built = state["param_groups"], optimizer.param_groups
    if len(saved) != len(built):
        return state  # which load_state_dict refuses
    classes = type(getattr(optimizer, "optim", optimizer)).__mro__
    made = [vars(one)["__init__"] for one in classes if "__init__" in vars(one)]
    names = {name for one in made for name in inspect.signature(one).parameters}
    names = {*names, "match", "lr_scale"} - {"params", "step"}  # FusedMixedPrecisionLamb takes its first step
    merged = []
    for old, new in zip(saved, built, strict=True):
        for name in (*_WITH_STATE, *(["momentum"] if "alpha" in new else [])):  # RMSprop makes its buffers at first
            if new.get(name) and not old.get(name):
                raise ValueError(f"the optimizer's {name} needs averages that were not kept without it")
        kept = {key: value for key, value in old.items() if key not in names}
        merged.append({**kept, **{key: value for key, value in new.items() if key in names}})
    return {**state, "param_groups": merged}


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


def find(name: str, sharded: bool = False) -> Any:
    """Return the class or function that makes the optimizer ``name``. Raises ConfigError, also if the parameters are
    ``sharded`` and it needs complete ones."""
    if "." in name:
        found = plugins.import_own("optimizer", name, "optimizer.name")
        if not plugins.makes(found, torch.optim.Optimizer):
            raise plugins.wrong_kind(name, "torch.optim.Optimizer", "optimizer.name")
        if sharded and getattr(found, "needs_whole_parameters", False):
            what = f"{name} needs complete parameters, but each rank holds only a shard"
            raise ConfigError(what, where="optimizer.name", hint="use sgd, adam or adamw, or parallel.strategy=ddp")
        return found
    if name not in (known := built_in()):
        raise plugins.unknown("optimizer", name, known, "optimizer.name")
    return known[name]


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.zero_grad()``, without torch's entry in the profiler, which costs 10 us, where it is torch's own."""
    if "zero_grad" in vars(optimizer) or type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


def built_in() -> dict[str, type[torch.optim.Optimizer]]:
    """torch's optimizers by their names in lower case, and Apex's as fused_NAME."""
    from harness.apex import optimizers as apex

    classes = {key.lower(): value for key, value in vars(torch.optim).items() if inspect.isclass(value)}
    found: dict[str, type[torch.optim.Optimizer]] = {
        key: value for key, value in classes.items() if issubclass(value, torch.optim.Optimizer)
    }
    for left_out in ("optimizer", "lbfgs"):  # the base class, and one that calls the model itself, which amp cannot do
        del found[left_out]
    for key in apex.__all__:
        if key != "FusedMixedPrecisionLamb":  # it keeps masters and unscales gradients itself, as amp does
            found[f"fused_{key.removeprefix('Fused').lower()}"] = getattr(apex, key)
    return found
