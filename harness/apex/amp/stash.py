"""``optimizer._amp_stash``: what amp keeps about one optimizer, and how masters travel in its state dict."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from harness.apex.accumulated_gradients import take_aside
from harness.apex.amp.device_flags import flags
from harness.apex.amp.master_weights import MasterWeights
from harness.apex.amp.messages import messages

SAVED = "master_params"  # key in each param group of a saved optimizer: one tensor or None per parameter


class AmpStash(MasterWeights):
    """The masters of an optimizer, if its level has them, and the state of its next step.

    ``already_patched``: the next ``step()`` will be skipped; ``skips`` is what the host knows of it, and ``flag``
    decides on the device, if it is not None. ``params_have_scaled_gradients``: gradients of delayed
    contexts wait to be unscaled; they carry the scale ``scaled_by``. ``backward_ended`` notes the end of a context of
    this optimizer, ``gradients_cleared`` that no model parameter has a gradient; ``warn_of_lost_gradients`` needs both.
    """

    num_contexts = 0  # contexts that have ended, of all optimizers: each may leave gradients in parameters of any

    def __init__(self, master_weights: bool) -> None:
        super().__init__()
        self.master_weights = master_weights
        self.skips = False
        self.flag: Tensor | None = None
        self.lazy_init_called = not master_weights
        self.params_have_scaled_gradients = False
        self.scaled_by: float | Tensor = 1.0
        self.deferred_to: Any = None  # the scaler whose overflow check waits for a reduction over ranks
        self.undo: list[Any] = []
        self.ever_scaled = False  # in a context of this optimizer
        self._warned = False
        self._cleared_at = -1

    @property
    def already_patched(self) -> bool:
        """Whether the next ``step()`` will be skipped. Waits for the device, if only that knows."""
        if self.flag is not None:
            flags.read_flags()
        return self.skips

    @already_patched.setter
    def already_patched(self, skips: bool) -> None:
        self.skips, self.flag = skips, None

    def hear(self, flag: Tensor, overflow: bool) -> None:
        """Note what the host has read from ``flag``, unless a step has used it already."""
        if self.flag is flag:
            self.flag = None
            self.skips |= overflow

    def take_flag(self) -> Tensor | None:
        """Return the flag that decides on the device whether the coming step is skipped; None if the host knows."""
        flag, self.flag = self.flag, None
        return flag

    def backward_ended(self) -> None:
        AmpStash.num_contexts += 1
        self.ever_scaled = True

    def gradients_cleared(self, certain: bool) -> None:
        self._cleared_at = AmpStash.num_contexts if certain else -1

    def may_have_lost_gradients(self) -> bool:
        """Return True if a gradient of a model parameter can only be from a backward pass outside every context."""
        return not self.ever_scaled or self._cleared_at == AmpStash.num_contexts

    def warn_of_lost_gradients(self) -> None:
        """Warn, once, if a model parameter has a gradient that its master has not and will not get."""
        pairs = zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True)
        if self._warned or not any(p.grad is not None and master.grad is None for p, master in pairs):
            return
        self._warned = True
        messages.warn_at_script(
            f"backward() was called outside amp.scale_loss. With {self.all_fp16_params[0].dtype} weights and float32 "
            "masters, the optimizer does not see these gradients: the weights are not updated from them. Use:\n"
            "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
            "        scaled_loss.backward()"
        )

    def drop_master_gradients(self) -> None:
        """Clear the gradients of masters that were made from model parameters."""
        for parameter, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True):
            master.grad = None
            take_aside(parameter)


def stash_of(optimizer: Optimizer) -> AmpStash:
    """Return the stash of ``optimizer``; raise RuntimeError if ``amp.initialize`` has not prepared it."""
    stash = getattr(optimizer, "_amp_stash", None)
    if not isinstance(stash, AmpStash):
        raise RuntimeError(
            f"scale_loss was given an optimizer ({type(optimizer).__name__}) that amp.initialize has not seen. Pass "
            "every optimizer to amp.initialize, and use the ones it returns."
        )
    return stash


def lazy_init(optimizer: Optimizer) -> None:
    """Create the masters of ``optimizer``, once, at its first use; gradients that already exist are kept."""
    stash = stash_of(optimizer)
    if not stash.lazy_init_called:
        stash.adopt_all(optimizer)
        stash.lazy_init_called = True
        _take_saved(optimizer)


def saving_masters(previous: Callable[..., Any]) -> Callable[..., Any]:
    """``Optimizer.state_dict``, with the masters in what ``previous`` returns.

    A method of the instance, not a hook: some optimizers wrap another one, pass state dicts on to it, and have no hooks
    because they never call ``Optimizer.__init__``.
    """

    @functools.wraps(previous)
    def state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> dict[str, Any]:
        flags.read_flags()  # which corrects counts of steps
        plain = previous(*args, **kwargs)
        return _with_masters(self, plain) if stash_of(self).master_weights else plain

    return state_dict


def loading_masters(previous: Callable[..., Any]) -> Callable[..., Any]:
    """``Optimizer.load_state_dict``, which also loads the masters."""

    @functools.wraps(previous)
    def load_state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        flags.read_flags()
        lazy_init(self)  # without masters the state would be rounded to the model's dtype (contract 3.5 B)
        previous(*args, **kwargs)
        stash = stash_of(self)
        if not stash.master_weights:
            drop_saved_masters(self)
            return
        _take_saved(self)
        if stash.all_fp16_params and not stash.saved and self.state:
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
    stash = stash_of(optimizer)
    lazy_init(optimizer)
    stash.refresh()
    if len(state_dict.get("param_groups", ())) != len(optimizer.param_groups):
        messages.warn(
            f"{type(optimizer).__name__}.state_dict() returns no param_groups, so it does not hold the master weights: "
            "a resumed run recreates them from the model's rounded weights. Return the wrapped optimizer's state dict.",
            always=True,
        )
        return state_dict
    masters = {id(master) for master in stash.all_fp32_from_fp16_params}
    groups = [
        {**saved, SAVED: [p.detach() if id(p) in masters else None for p in group["params"]]}
        for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**state_dict, "param_groups": groups}


def _take_saved(optimizer: Optimizer) -> None:
    """Move the saved masters out of the groups of ``optimizer`` (see ``SAVED``) into its masters.

    Without saved masters (a checkpoint of Apex or of another level) the masters follow the model's weights.
    """
    stash = stash_of(optimizer)
    masters = {id(master) for master in stash.all_fp32_from_fp16_params}
    saved: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for master, value in zip(group["params"], group.pop(SAVED, None) or [], strict=False):
            if value is not None and id(master) in masters and value.shape == master.shape:
                saved[master] = value.to(master.device, master.dtype)
    stash.load(saved)
