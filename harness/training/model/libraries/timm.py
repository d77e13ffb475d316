"""Models of timm (``timm:NAME``), and the weights that it publishes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch import nn

from harness.data import hub
from harness.errors import ConfigError, similar
from harness.training.model.libraries.base import KEY, PRETRAINED, WeightsFile, downloaded

_PREFIX = "timm:"


def _models(name: str) -> Any:
    """Return the module timm, which has the model ``name``. Raises ConfigError."""
    try:
        import timm
    except ImportError:
        message, hint = f"model {name} needs timm, which is not installed", "pip install 'apex-harness[timm]'"
        raise ConfigError(message, where="model.name", hint=hint) from None
    return timm


def maker(name: str) -> Callable[..., nn.Module]:
    timm = _models(name)
    timm_name = name.removeprefix(_PREFIX)
    kind, _, tag = timm_name.partition(".")
    if not timm.is_model(timm_name):
        nearest = similar(kind, timm.list_models())
        hint = f"did you mean {_PREFIX}{nearest}?" if nearest else "timm.list_models() lists them"
        raise ConfigError(f"timm has no model {timm_name!r}", where="model.name", hint=hint)
    try:
        timm.models.get_pretrained_cfg(timm_name)
    except RuntimeError:  # of its tag
        tags = timm.list_pretrained(f"{kind}.*")
        nearest = similar(timm_name, tags)
        others = f", or one of {', '.join(tags)}" if tags else ""
        hint = f"did you mean {_PREFIX}{nearest}?" if nearest else f"use {_PREFIX}{kind}{others}"
        raise ConfigError(f"timm has no weights {tag!r} of {kind}", where="model.name", hint=hint) from None
    return partial(timm.create_model, timm_name)


def arguments(known: Mapping[str, Any]) -> dict[str, Any]:
    return {"in_chans" if key == "in_channels" else key: value for key, value in known.items()}


def published(weights: str, name: str) -> Callable[[], WeightsFile]:
    config = _models(name).models.get_pretrained_cfg(name.removeprefix(_PREFIX), allow_unregistered=False)
    hub_id, url = (str(config.hf_hub_id or ""), str(config.url or "")) if config else ("", "")
    if weights not in PRETRAINED or config is None or not (hub_id or url):
        error = "timm has no pretrained weights for this model" if weights in PRETRAINED else f"no such file: {weights}"
        hint = "use pretrained, a file, a run folder or a URL; timm.list_pretrained() lists models"
        raise ConfigError(error, where=KEY, hint=hint)

    def get() -> WeightsFile:
        file = config.hf_hub_filename or "model.safetensors"
        path = hub.file(hub_id, file, KEY) if hub_id else downloaded(url, Path(urlsplit(url).path).name)
        return WeightsFile(f"{name} {hub_id or url}", path, (config.mean, config.std))

    return get
