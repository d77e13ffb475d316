"""Activation checkpointing: blocks of a model keep only their inputs, and run again in the backward pass.

The second run is exact: torch restores the random stream and the casts of the first, and this module the buffers, such
as the statistics of a batch norm, which are updated once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.errors import ConfigError
from harness.training.model import module_names
from harness.training.strategies import sharding

_Norm = torch.nn.modules.batchnorm._NormBase  # of batch and instance norms; changes buffers without a new version
_KEY = "model.activation_checkpointing"


def apply(model: nn.Module, patterns: bool | Sequence[str]) -> list[str]:
    """Make the ``patterns`` modules of ``model`` run again in the backward pass; return their names. Only for training:
    to export the model or to copy it to other devices, build it without.

    ``True``: its ``repeated_blocks``; patterns: the outermost modules whose names match one. Names of parameters stay
    as they are. Raises ConfigError if there is no such module.
    """
    if not patterns:
        return []
    names = {module: name for name, module in model.named_modules() if name}
    modules = repeated_blocks(model) if isinstance(patterns, bool) else _outermost(names, patterns)
    if patterns is True and not modules:
        raise ConfigError(
            "the model has no blocks: no element of a Sequential, ModuleList or ModuleDict has submodules",
            where=_KEY,
            hint=f"name the modules to run again, such as {_KEY}=[{next(iter(names.values()), 'layers')}]",
        )
    for module in modules:
        module.forward = _Recomputed(module)  # type: ignore[assignment]
    return [names[module] for module in modules]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the elements of the containers of ``model`` that occur repeatedly and have several parts: the layers of a
    transformer, the blocks of a residual network. To run a single layer again would save nothing."""
    elements = [
        module for module in sharding.elements(model)
        if len(list(module.modules())) > 2 and next(module.parameters(), None) is not None
    ]  # fmt: skip
    kinds = Counter(map(type, elements))
    blocks: dict[nn.Module, None] = {}
    inside: set[nn.Module] = set()
    for module in reversed(elements):  # outer before inner
        parts = set(module.modules()) - {module}
        if module not in inside and (kinds[type(module)] > 1 or not parts.intersection(elements)):
            blocks[module] = None
            inside |= parts
    return list(reversed(blocks))


def _outermost(names: dict[nn.Module, str], patterns: Sequence[str]) -> list[nn.Module]:
    modules = {name: module for module, name in names.items()}
    matching = [module_names.matching(pattern, modules, _KEY, "module of the model") for pattern in patterns]
    matched = {modules[name] for each in matching for name in each}
    inside = {part for module in matched for part in list(module.modules())[1:]}
    return [module for module in names if module in matched and module not in inside]


class _Recomputed:
    """The ``forward`` of a module that runs again in the backward pass."""

    def __init__(self, module: nn.Module) -> None:
        self._forward: Callable[..., Any] = module.forward
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # which traces the changes of buffers, and makes them once
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        buffers = list(self._buffers())
        before = {(owner, name): buffer.clone() for owner, name, buffer in buffers}
        versions = [buffer._version for _, _, buffer in buffers]
        outputs = checkpoint(
            self._forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _Restored(before)), **kwargs
        )
        changed = {
            (owner, name)
            for (owner, name, buffer), version in zip(buffers, versions, strict=True)
            if owner._buffers[name] is not buffer or buffer._version != version or isinstance(owner, _Norm)
        }
        for key in before.keys() - changed:  # not needed in the backward pass
            del before[key]
        return outputs

    def _buffers(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for owner in self._module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    yield owner, name, buffer


class _Restored:
    """Context in which modules have the buffers ``before``; changes of these are forgotten at its end. May be entered
    again: a graph that is kept runs the modules once per backward pass."""

    def __init__(self, before: dict[tuple[nn.Module, str], Tensor]) -> None:
        self._before = before
        self._now: dict[tuple[nn.Module, str], Tensor | None] = {}

    def __enter__(self) -> None:
        self._now = {(owner, name): owner._buffers[name] for owner, name in self._before}
        for (owner, name), buffer in self._before.items():
            owner._buffers[name] = buffer.clone()

    def __exit__(self, *_: object) -> None:
        for (owner, name), buffer in self._now.items():
            owner._buffers[name] = buffer
        self._now = {}
