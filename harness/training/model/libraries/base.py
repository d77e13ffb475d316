"""What a library of models provides, and how it gets the weights that it publishes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from harness.errors import ConfigError, DataError, reason
from harness.runs import fetch
from harness.runs.files import cache_folder, sha256

KEY = "model.weights"
PRETRAINED = ("DEFAULT", "pretrained")  # torchvision's and timm's word for the best published weights
_ELSEWHERE = "or download the file elsewhere and set model.weights=FILE"


class WeightsFile(NamedTuple):
    """Weights that exist on this machine."""

    name: str
    """For messages."""
    path: Path
    statistics: tuple[Any, Any] | None = None
    """Mean and standard deviation of the images they expect; None in it: null."""
    read: Callable[[nn.Module], Mapping[str, Any]] | None = None
    """Returns those that a model has too, by their names in it; None: they are read as ``path`` has them."""
    classes: Sequence[str] = ()
    """Names of its outputs; empty: not known."""


class Library(Protocol):
    """A module of this folder. ``name``: of a model, with the prefix. All raise ConfigError."""

    def maker(self, name: str) -> Callable[..., nn.Module]:
        """Return the function that makes the model with random weights."""
        ...

    def arguments(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the numbers that the task knows, such as num_classes, as arguments of the function."""
        ...

    def published(self, weights: str, name: str) -> Callable[[], WeightsFile]:
        """Return what gets ``weights``, which are published for the model."""
        ...


def downloaded(url: str, name: str, digest: str = "") -> Path:
    """Return the file at ``url`` in torch's folder of downloads, which is read first. ``digest``: how its SHA-256
    begins."""
    hub = torch.hub.get_dir()  # where torchvision keeps its own; it begins with ~ where no home folder is known
    folder = Path(cache_folder() / "torch" if hub.startswith("~") else hub, "checkpoints")
    # Another file of the same name may be there already: only the URL tells them apart.
    target = folder / (name if digest else f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-{name}")
    try:
        return fetch.fetched(url, target, lambda path: not digest or sha256(path).startswith(digest))
    except FileNotFoundError as error:
        hint = f"check the name and the network; {_ELSEWHERE}"
        raise ConfigError(
            f"the weights cannot be downloaded: {reason(error)}", where=f"{KEY}: {url}", hint=hint
        ) from None
    except DataError as error:
        raise ConfigError(error.message, where=f"{KEY}: {url}", hint=f"{error.hint}; {_ELSEWHERE}") from None
