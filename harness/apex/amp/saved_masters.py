"""Masters in the state dict of their optimizer: how they are saved and loaded (contract 3.5)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from harness.apex.amp.device_flags import flags
from harness.apex.amp.master_weights import SAVED
from harness.apex.amp.messages import messages
from harness.apex.amp.stash import stash_of


def saving_masters(previous: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``Optimizer.state_dict`` that adds the masters to what ``previous`` returns.

    It is a method of the instance, not a hook: some optimizers wrap another one, pass state dicts on to it, and have
    no hooks because they never call ``Optimizer.__init__``.
    """

    @functools.wraps(previous)
    def state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> dict[str, Any]:
        flags.read_flags()  # which corrects counts of steps
        stash = stash_of(self)
        if not stash.master_weights:
            return previous(*args, **kwargs)
        stash.create_masters(self)  # first, so that state made before them has the order and dtype that it will have
        stash.refresh()
        return _with_masters(self, previous(*args, **kwargs))

    return state_dict


def loading_masters(previous: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``Optimizer.load_state_dict`` that calls ``previous`` and also loads the masters."""

    @functools.wraps(previous)
    def load_state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        flags.read_flags()
        stash = stash_of(self)
        stash.create_masters(self)  # without them the state would be rounded to the model's dtype (contract 3.5 B)
        previous(*args, **kwargs)
        if not stash.master_weights:
            drop_saved_masters(self)
            return
        if not stash.take_saved(self) and stash.all_fp16_params and self.state:
            messages.warn(
                "The loaded optimizer state holds no master weights: neither Apex nor opt levels without masters save "
                "them. The masters are recreated from the model's weights, which are rounded to "
                f"{stash.all_fp16_params[0].dtype} in an Apex checkpoint; their extra precision is lost. Everything "
                "else is restored.",
                always=True,
            )

    return load_state_dict


def drop_saved_masters(optimizer: Optimizer) -> None:
    """Remove masters that came with the checkpoint of another level; this level steps on the weights."""
    for group in optimizer.param_groups:
        group.pop(SAVED, None)


def _with_masters(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Put the masters (aliases, like all of a state dict) into their param group, None where there is none.

    A plain torch optimizer carries them along there, so they survive being loaded before ``initialize``.
    """
    if len(state_dict.get("param_groups", ())) != len(optimizer.param_groups):
        messages.warn(
            f"{type(optimizer).__name__}.state_dict() returns no param_groups, so it does not hold the master weights: "
            "a resumed run recreates them from the model's rounded weights. Return the wrapped optimizer's state dict.",
            always=True,
        )
        return state_dict
    masters = {id(master) for master in stash_of(optimizer).all_fp32_from_fp16_params}
    groups = [
        {**saved, SAVED: [p.detach() if id(p) in masters else None for p in group["params"]]}
        for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**state_dict, "param_groups": groups}
