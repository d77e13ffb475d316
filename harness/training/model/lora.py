"""Low-rank adaptation (``model.lora``) of any model, by the library peft."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import nn

from harness.config.schema import LoraSection
from harness.data import hub
from harness.errors import ConfigError, first_line, plural
from harness.training.model import module_names
from harness.training.model.module_names import LORA, is_within

BASE_LAYER = ".base_layer."  # in those of the weights of an adapted layer
_ALL = "all-linear"  # but the last layers, as peft calls them
_LINEAR = ("Linear", "Conv1D")  # the latter of transformers, for GPT-2
_KINDS = (*_LINEAR, "Conv1d", "Conv2d", "Conv3d", "Embedding")


def apply(model: nn.Module, section: LoraSection) -> None:
    """Freeze all of ``model`` except its last layers and modules_to_save, and put matrices to train beside the layers
    that ``section`` names. Raises ConfigError."""
    hub.require("peft", "model.lora")
    from peft import LoraConfig, inject_adapter_in_model

    modules = {name: "" for name, _ in model.named_modules() if name}
    saved = [name for target in section.modules_to_save for name in _matching(target, modules, "modules_to_save")]
    heads = last_layers(model)
    layers = {name: type(module).__name__ for name, module in model.named_modules() if _is_layer(module)}
    plain = [name for name, kind in layers.items() if kind in _LINEAR and not is_within(name, heads)]
    chosen = {
        name
        for target in section.targets or (_ALL,)
        for name in (plain if target == _ALL else _matching(target, layers, "targets"))
    }
    chosen = {name for name in chosen if not is_within(name, saved)}
    if not chosen:
        message = "it has no linear layers to adapt but the last ones and those of modules_to_save"
        hint = f"name its layers in model.lora.targets, such as {', '.join([*layers][:5])}"
        raise ConfigError(message, where="model.lora", hint=hint)
    try:
        lora_config = LoraConfig(
            r=section.r, lora_alpha=section.alpha, lora_dropout=section.dropout,  # type: ignore[arg-type]
            use_rslora=section.use_rslora, use_dora=section.use_dora,
            target_modules="|".join(map(re.escape, sorted(chosen))),
        )  # fmt: skip
        inject_adapter_in_model(lora_config, model)
    except ValueError as error:
        raise ConfigError(f"peft cannot adapt this model: {first_line(error)}", where="model.lora") from None
    for name, param in model.named_parameters():
        param.requires_grad_(LORA in name or (is_within(name, heads + saved) and BASE_LAYER not in name))


def summary(model: nn.Module, section: LoraSection) -> str:
    """Return what ``apply`` did to ``model``."""
    layers = adapted(model)
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    listed = ", ".join(ends if len(ends) <= 6 else [*ends[:5], "..."])
    kind = ", rsLoRA" * section.use_rslora + ", DoRA" * section.use_dora
    return f"r {section.r}, alpha {section.alpha:g}{kind}, on {plural(len(layers), 'layer')} ({listed})"


def start_norms(model: nn.Module, given: Collection[str]) -> None:
    """Start the norms of DoRA that are not ``given`` at those of the weights, which have been loaded, so that the
    matrices change no output yet."""
    for name in adapted(model):
        layer: Any = model.get_submodule(name)
        norms = layer.lora_magnitude_vector
        if "default" in norms and f"{name}{LORA}magnitude_vector.default.weight" not in given:
            trained = norms["default"].weight.requires_grad
            layer.lora_variant["default"].init(layer, "default")
            norms["default"].requires_grad_(trained)


def adapted(model: nn.Module) -> list[str]:
    """Return the names of the layers that have matrices."""
    return [name for name, module in model.named_modules() if hasattr(module, "get_base_layer")]


def merge(model: nn.Module, removed: Collection[str] = (), within: Collection[str] | None = None) -> None:
    """Add the matrices to the weights of ``model``, which then has its own layers again: of all layers, or of those
    ``within`` some modules; matrices of the layers ``removed`` are not added."""
    for name in adapted(model):
        if within is not None and not is_within(name, within):
            continue
        layer: Any = model.get_submodule(name)
        if name not in removed:
            layer.merge()
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer.get_base_layer())


def _is_layer(module: nn.Module) -> bool:
    return type(module).__name__ in _KINDS and next(module.parameters(), None) is not None


def last_layers(model: nn.Module) -> list[str]:
    """Return the names of the last layers: of a model of transformers, all but its base model; else the last with
    weights."""
    base = getattr(model, "base_model_prefix", "")
    if base and hasattr(model, base):
        return [name for name, _ in model.named_children() if name != base]
    return [name.rpartition(".")[0] for name, _ in model.named_parameters()][-1:]


def _matching(target: str, names: Collection[str], key: str) -> list[str]:
    return module_names.matching(target, names, f"model.lora.{key}", "layer of the model")
