"""What ``initialize`` does to an optimizer (contract 1.8): methods replaced on the instance, hooks on its state dict.

The names set on the instance are Apex's and scripts call them. Everything set is recorded in ``_amp_stash.undo``, so
``release`` gives the optimizer back as it came. Learning-rate schedulers may be made before or after: the marks they
put on ``step`` are carried over, and a skipped step counts as called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.apex.amp import gradients, masters, o1
from harness.apex.amp.masters import SAVED, AmpStash
from harness.apex.amp.scaler import LossScaler
from harness.apex.amp.state import warn

NAMES = (
    "_amp_stash",
    "_lazy_init_maybe_master_weights",
    "_amp_lazy_init",
    "_prepare_amp_backward",
    "_post_amp_backward",
    "_master_params_to_model_params",
)


def check_fresh(optimizer: Optimizer) -> None:
    """Raise RuntimeError if ``optimizer`` was already given to ``initialize``."""
    # also of one that it wraps and whose attributes it hands on, such as LARC
    taken = [name for name in NAMES if hasattr(optimizer, name)]
    if taken:
        raise RuntimeError(
            f"This {type(optimizer).__name__} already has {', '.join(taken)}: an optimizer can only be passed to "
            "amp.initialize once. Make a new one, or call amp.reset() first to start over in this process."
        )


def adopt(optimizer: Optimizer, master_weights: bool, casts_functions: bool) -> None:
    """Teach ``optimizer`` to work with amp; masters themselves are created at its first use."""
    stash = AmpStash(master_weights)
    _set(optimizer, stash, "_amp_stash", stash)
    own: dict[str, Callable[..., Any]] = {
        "_lazy_init_maybe_master_weights": masters.lazy_init,
        "_amp_lazy_init": masters.lazy_init,
        "_prepare_amp_backward": gradients.prepare,
        "_post_amp_backward": _post_backward,
    }
    if master_weights:
        own["_master_params_to_model_params"] = _copy_to_model
        own["step"] = _step_with_masters(optimizer.step)
        own["zero_grad"] = _zero_grad_with_masters
        own["add_param_group"] = _add_param_group_with_masters(optimizer.add_param_group)
    else:
        own["step"] = _step(optimizer.step, casts_functions)
        _drop_saved_masters(optimizer)
        # the optimizers of harness.apex keep float32 state for float16 parameters, torch's have it in their dtype
        kept = getattr(optimizer, "keeps_wide_state", False)
        for parameter in masters.all_params(optimizer):
            if parameter in optimizer.state and not kept:
                optimizer.state[parameter] = masters.recast_state(optimizer.state[parameter], parameter)
    for name, function in own.items():
        _set(optimizer, stash, name, MethodType(function, optimizer))
    stash.undo += [
        optimizer.register_state_dict_post_hook(_save_masters).remove,
        optimizer.register_load_state_dict_pre_hook(_before_load).remove,
        optimizer.register_load_state_dict_post_hook(_after_load).remove,
    ]


def release(optimizer: Optimizer) -> None:
    """Undo ``adopt``. Masters that were created stay in ``param_groups``."""
    stash: AmpStash | None = optimizer.__dict__.get("_amp_stash")
    if stash is not None:
        for undo in reversed(stash.undo):
            undo()


def _set(optimizer: Optimizer, stash: AmpStash, name: str, value: Any) -> None:
    attributes = optimizer.__dict__
    if name in attributes:
        stash.undo.append(functools.partial(attributes.__setitem__, name, attributes[name]))
    else:
        stash.undo.append(functools.partial(attributes.pop, name, None))
    attributes[name] = value


def _skip(optimizer: Optimizer, stash: AmpStash, closure: Any) -> None:
    """The step after an overflow: nothing but forgetting the masters' gradients (contract 2.3)."""
    if closure is not None:
        raise RuntimeError(
            "This step is to be skipped after a gradient overflow, and step(closure) would run the closure all the "
            "same. Call step() without a closure under dynamic loss scaling."
        )
    stash.already_patched = False
    optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler would say step() was never called
    masters.drop_master_gradients(stash)


def _must_skip(optimizer: Optimizer, stash: AmpStash) -> bool:
    """Whether this ``step()`` is to do nothing; also refuses to step on gradients that still carry a loss scale."""
    if stash.params_have_scaled_gradients and any(p.grad is not None for p in _scaled_params(optimizer, stash)):
        raise RuntimeError(
            "step() was called while gradients still carry the loss scale: the last scale_loss had delay_unscale=True. "
            "Leave delay_unscale out in the last micro-batch before step()."
        )
    if stash.owed is not None:
        scaler, stash.owed = stash.owed, None
        stash.already_patched |= gradients.settle(optimizer, scaler)
    return stash.already_patched


def _scaled_params(optimizer: Optimizer, stash: AmpStash) -> list[Tensor]:
    return (
        stash.all_fp16_params + stash.all_fp32_params if stash.master_weights else list(masters.all_params(optimizer))
    )


def _step(previous: Callable[..., Any], casts_functions: bool) -> Callable[..., Any]:
    @functools.wraps(previous)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        stash: AmpStash = self._amp_stash  # type: ignore[attr-defined]
        if _must_skip(self, stash):
            return _skip(self, stash, args[0] if args else kwargs.get("closure"))
        if casts_functions:
            with o1.disable_casts():
                return previous(*args, **kwargs)
        return previous(*args, **kwargs)

    return step


def _step_with_masters(previous: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(previous)
    def step(self: Optimizer, closure: Any = None) -> Any:
        stash: AmpStash = self._amp_stash  # type: ignore[attr-defined]
        if _must_skip(self, stash):
            return _skip(self, stash, closure)
        if closure is not None:
            raise RuntimeError(
                "An optimizer with master weights does not support a closure: seen step(closure). Compute the loss "
                'before and call step() without arguments, or use opt_level="O1".'
            )
        masters.lazy_init(self)
        masters.refresh(stash)
        result = previous()
        masters.copy_to_model(stash)
        masters.drop_master_gradients(stash)
        stash.saved = {}
        return result

    return step


def _zero_grad_with_masters(self: Optimizer, set_to_none: bool = True) -> None:
    """Clear the gradients of model parameters and masters; those of masters always become None."""
    stash: AmpStash = self._amp_stash  # type: ignore[attr-defined]
    masters.lazy_init(self)
    masters.drop_master_gradients(stash)
    stash.params_have_scaled_gradients = False
    zeroed: list[Tensor] = []
    for parameter in (*stash.all_fp16_params, *stash.all_fp32_params, *stash.frozen):
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad = parameter.grad.detach()
            zeroed.append(parameter.grad)
    if zeroed:
        torch._foreach_zero_(zeroed)


def _add_param_group_with_masters(previous: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(previous)
    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        masters.lazy_init(self)
        previous(param_group)
        masters.adopt_group(self, self.param_groups[-1])

    return add_param_group


def _post_backward(self: Optimizer, scaler: LossScaler) -> None:
    gradients.finish(self, scaler, scaler.loss_scale())


def _copy_to_model(self: Optimizer) -> None:
    masters.copy_to_model(self._amp_stash)  # type: ignore[attr-defined]


def _save_masters(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """State-dict hook: masters travel inside their param group, where a plain torch optimizer carries them along too,
    so that they survive being loaded before ``initialize``."""
    stash: AmpStash = optimizer._amp_stash  # type: ignore[attr-defined]
    if not stash.master_weights:
        return state_dict
    masters.lazy_init(optimizer)
    masters.refresh(stash)
    groups = zip(state_dict["param_groups"], masters.saved_masters(optimizer), strict=True)
    return {**state_dict, "param_groups": [{**group, SAVED: saved} for group, saved in groups]}


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load hook: masters must exist first, or the state would be rounded to the model's dtype (contract 3.5 B)."""
    masters.lazy_init(optimizer)


def _after_load(optimizer: Optimizer) -> None:
    stash: AmpStash = optimizer._amp_stash  # type: ignore[attr-defined]
    if stash.master_weights:
        masters.take_saved(optimizer, optimizer.param_groups)
        masters.record_versions(stash)
        if stash.all_fp16_params and not stash.saved and optimizer.state:
            warn(
                "The optimizer state that was loaded holds no master weights: Apex saved none, nor do levels without "
                "them. They start again from the model's weights, which a checkpoint of Apex rounded to "
                f"{stash.all_fp16_params[0].dtype}; what the masters had beyond that is lost. The rest is as saved.",
                always=True,
            )
    else:
        _drop_saved_masters(optimizer)


def _drop_saved_masters(optimizer: Optimizer) -> None:
    """Forget masters that came with a checkpoint of a level that has them; this level steps on the weights."""
    for group in optimizer.param_groups:
        group.pop(SAVED, None)
