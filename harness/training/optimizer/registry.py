"""The optimizers that a configuration can name: torch's, Apex's and the user's own."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from harness.config import plugins
from harness.errors import ConfigError


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


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of ``optimizer``, without the wrapper that LARC is."""
    return type(getattr(optimizer, "optim", optimizer)).__name__
