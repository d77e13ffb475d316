"""The state of an optimizer, loaded from a run with other settings."""

from __future__ import annotations

import inspect
from typing import Any

import torch

_WITH_STATE = ("amsgrad", "centered")  # settings of torch's optimizers that keep another average from the first step


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
