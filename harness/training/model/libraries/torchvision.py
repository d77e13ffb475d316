"""Models of torchvision, such as resnet18 or torchvision:resnet18, and the weights that it publishes. Its import takes
long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch import nn

from harness.config import plugins
from harness.errors import ConfigError, similar
from harness.training.model.libraries.base import KEY, PRETRAINED, WeightsFile, downloaded

_PREFIX = "torchvision:"


def _models() -> Any:
    from harness.data import vision  # late: few runs need it

    return vision.torchvision("models")


def names() -> list[str]:
    """Return the names of all models."""
    models: list[str] = _models().list_models()
    return models


def maker(name: str) -> Callable[..., nn.Module]:
    model_name = name.removeprefix(_PREFIX)
    if model_name not in names():
        raise plugins.unknown("model", model_name, names(), "model.name", "torchvision.models.list_models() lists them")
    builder: Callable[..., nn.Module] = _models().get_model_builder(model_name)
    return builder


def arguments(known: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in known.items() if key != "in_channels"}  # all want 3


def published(weights: str, name: str) -> Callable[[], WeightsFile]:
    all_weights = _models().get_model_weights(name.removeprefix(_PREFIX))
    weights_name = "DEFAULT" if weights in PRETRAINED else weights
    if weights_name not in all_weights.__members__:
        nearest = similar(weights_name, list(all_weights.__members__))
        hint = f"did you mean {nearest}?" if nearest else f"use one of {', '.join(all_weights.__members__)}, or a file"
        raise ConfigError(f"torchvision has no weights {weights_name} for {name}", where=KEY, hint=hint)
    chosen = all_weights[weights_name]
    file = Path(urlsplit(chosen.url).path).name
    digest = Path(file).stem.rpartition("-")[2]  # the first digits of the SHA-256, by torchvision's rule
    transforms = chosen.transforms()
    statistics = (transforms.mean, transforms.std) if hasattr(transforms, "mean") else None
    return lambda: WeightsFile(f"{name} {chosen.name} ({file})", downloaded(chosen.url, file, digest), statistics)
