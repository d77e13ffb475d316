"""Which parameters are trained, and in which groups of the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.config.schema import OptimizerSection
from harness.errors import ConfigError, plural
from harness.training.model import module_names

log = logging.getLogger("harness")


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Stop the training of the parameters whose names match one of ``patterns``. LoRA's matrices stay trained unless
    the pattern has "lora" in it. Raises ConfigError if a pattern matches nothing or only matrices that stay trained,
    or if everything is frozen."""
    named = dict(model.named_parameters())
    for pattern in patterns:
        found = _matching(pattern, named, "model.freeze")
        kept = [] if "lora" in pattern else [name for name in found if module_names.LORA in name]
        if len(kept) == len(found):
            what = f"{pattern!r} matches only matrices of LoRA, which stay trained"
            raise ConfigError(what, where="model.freeze", hint='remove it; a pattern with "lora" in it freezes them')
        if not any(named[name].requires_grad for name in {*found} - {*kept}):
            log.warning("model.freeze: %r changes nothing: what it matches is not trained anyway", pattern)
        for name in {*found} - {*kept}:
            named[name].requires_grad_(False)
    if named and not any(param.requires_grad for param in named.values()):
        hint = "remove a pattern: the last layer is usually trained"
        raise ConfigError("every parameter is frozen", where="model.freeze", hint=hint)


def groups(section: OptimizerSection, model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return the trainable parameters of ``model`` for ``optimizer_builder.build``: those that no group of ``section``
    matches, then the groups in their order. Raises ConfigError if a group matches no parameter."""
    left = {name: param for name, param in model.named_parameters() if param.requires_grad}
    every, found = dict(left), []
    for number, group in enumerate(section.groups):
        matching = _matching(group.match, every, f"optimizer.groups.{number}.match")
        params = [left.pop(name) for name in matching if name in left]
        values: dict[str, Any] = {"match": group.match, "lr": lr * group.lr_scale, "lr_scale": group.lr_scale}
        if group.weight_decay is not None:
            values["weight_decay"] = group.weight_decay
        found += [{"params": params, **values}] if params else []
    return [{"params": list(left.values())}, *found] if left else found


def _matching(pattern: str, named: Mapping[str, nn.Parameter], where: str) -> list[str]:
    flat = [name for name, param in named.items() if param.dim() <= 1] if pattern == "1d" else []
    return flat or module_names.matching(pattern, named, where, "trainable parameter")


def describe(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, str]:
    """Return the groups and what is frozen, for the log and ``harness check``. Empty if everything is trained alike."""
    facts = {}
    if frozen := [param for param in model.parameters() if not param.requires_grad]:
        facts["frozen"] = _size(frozen, f" of {sum(param.numel() for param in model.parameters()):,}")
    if any("match" in group for group in optimizer.param_groups):
        for number, group in enumerate(optimizer.param_groups):
            values = [f"{key} {group[key]:g}" for key in ("lr", "weight_decay") if key in group]
            which = group.get("match", "the others")
            facts[f"group {number}"] = f"{', '.join(values)}: {which} ({_size(group['params'])})"
    return facts


def _size(params: Sequence[Tensor], of: str = "") -> str:
    return f"{sum(p.numel() for p in params):,}{of} parameters in {plural(len(params), 'tensor')}"
