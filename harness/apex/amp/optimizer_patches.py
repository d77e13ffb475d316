"""Changes of ``initialize`` to an optimizer (contract 1.8): methods replaced on the instance.

Scripts call the names set on the instance; they are Apex's. Every change is recorded in ``_amp_stash.undo`` for
``release``. Learning-rate schedulers may be created before or after: the marks they put on ``step`` are carried over,
and a skipped step counts as called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.apex.amp import cast_engine, gradients
from harness.apex.amp.device_flags import step_with_flag
from harness.apex.amp.master_weights import all_params, recast_state
from harness.apex.amp.saved_masters import drop_saved_masters, loading_masters, saving_masters
from harness.apex.amp.scaler import LossScaler
from harness.apex.amp.stash import AmpStash, stash_of

NAMES = (
    "_amp_stash",
    "_lazy_init_maybe_master_weights",
    "_amp_lazy_init",
    "_prepare_amp_backward",
    "_post_amp_backward",
    "_master_params_to_model_params",
)


def check_fresh(optimizer: Optimizer) -> None:
    """Raise RuntimeError if ``optimizer``, or one whose attributes it forwards (LARC), was already initialized."""
    taken = [name for name in NAMES if hasattr(optimizer, name)]
    if taken:
        raise RuntimeError(
            f"This {type(optimizer).__name__} already has {', '.join(taken)}: an optimizer can only be passed to "
            "amp.initialize once. Make a new one, or call amp.reset() first to start over in this process."
        )


def adopt(optimizer: Optimizer, master_weights: bool, casts_functions: bool) -> None:
    """Make ``optimizer`` work with amp; masters themselves are created at its first use."""
    stash = AmpStash(master_weights)
    _set(optimizer, stash, "_amp_stash", stash)
    own: dict[str, Callable[..., Any]] = {
        "state_dict": saving_masters(optimizer.state_dict),
        "load_state_dict": loading_masters(optimizer.load_state_dict),
        "_lazy_init_maybe_master_weights": _create_masters,
        "_amp_lazy_init": _create_masters,
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
        own["zero_grad"] = _zero_grad(optimizer.zero_grad)
        drop_saved_masters(optimizer)
        # harness.apex's optimizers keep float32 state for float16 parameters; torch's have it in the parameter's dtype
        if not getattr(optimizer, "keeps_wide_state", False):
            for parameter in all_params(optimizer):
                if parameter in optimizer.state:
                    optimizer.state[parameter] = recast_state(optimizer.state[parameter], parameter)
    for name, function in own.items():
        _set(optimizer, stash, name, MethodType(function, optimizer))


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
    """Do the step after an overflow: only clear the masters' gradients (contract 2.3)."""
    if closure is not None:
        raise RuntimeError(
            "This step must be skipped after a gradient overflow, but step(closure) would run the closure anyway. "
            "Call step() without a closure under dynamic loss scaling."
        )
    stash.already_patched = False
    optimizer._opt_called = True  # type: ignore[attr-defined]  # else a scheduler warns that step() was never called
    stash.drop_master_gradients()


def _check_step(optimizer: Optimizer, stash: AmpStash) -> None:
    """Do an overflow check that waits for this ``step()``, on this rank's gradients alone, as they were never reduced;
    raise if gradients still carry a loss scale."""
    scaled = (
        gradients.own_params(optimizer, stash) + stash.all_fp16_params if stash.params_have_scaled_gradients else []
    )
    if any(parameter.grad is not None for parameter in scaled):
        raise RuntimeError(
            "step() was called while gradients still carry the loss scale: the last scale_loss had delay_unscale=True. "
            "Leave delay_unscale out in the last micro-batch before step()."
        )
    if stash.deferred_to is not None:
        scaler, stash.deferred_to = stash.deferred_to, None
        found = [parameter.grad for parameter in all_params(optimizer) if parameter.grad is not None]
        scaler.unscale_([gradients.values_of(gradient) for gradient in found], 1.0)
        stash.already_patched |= scaler.update_scale()
        scaler.clear_overflow_state()


def _step(previous: Callable[..., Any], casts_functions: bool) -> Callable[..., Any]:
    """Return the ``step`` of an optimizer without masters, which may skip ``previous`` and runs it without casts."""

    @functools.wraps(previous)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        stash = stash_of(self)
        _check_step(self, stash)
        flag = None if args or kwargs else stash.take_flag()
        if flag is None and stash.already_patched:
            return _skip(self, stash, args[0] if args else kwargs.get("closure"))
        with cast_engine.disable_casts() if casts_functions else nullcontext():
            if flag is not None:
                return step_with_flag(self, flag, previous)
            return previous(*args, **kwargs)

    return step


def _step_with_masters(previous: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``step`` of an optimizer with masters, which may skip ``previous`` and copies them to the model."""

    @functools.wraps(previous)
    def step(self: Optimizer, closure: Any = None) -> Any:
        stash = stash_of(self)
        _check_step(self, stash)
        if stash.already_patched:
            return _skip(self, stash, closure)
        if closure is not None:
            raise RuntimeError(
                "An optimizer with master weights does not support step(closure). Compute the loss "
                'first and call step() without arguments, or use opt_level="O1".'
            )
        stash.create_masters(self)
        stash.refresh()
        result = previous()
        stash.copy_to_model()
        stash.drop_master_gradients()
        stash.forget_saved()
        return result

    return step


def _zero_grad(previous: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``zero_grad`` of an optimizer without masters: no gradient carries a loss scale after it."""

    @functools.wraps(previous)
    def zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        stash_of(self).params_have_scaled_gradients = False
        return previous(*args, **kwargs)

    return zero_grad


def _zero_grad_with_masters(self: Optimizer, set_to_none: bool = True) -> None:
    """Clear the gradients of model parameters and masters; those of masters always become None."""
    stash = stash_of(self)
    stash.create_masters(self)
    stash.drop_master_gradients()
    stash.params_have_scaled_gradients = False
    zeroed: list[Tensor] = []
    for parameter in (*stash.all_fp16_params, *stash.all_fp32_from_fp32_params, *stash.frozen):
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
        stash = stash_of(self)
        stash.create_masters(self)
        stash.add_group(self, previous, param_group)

    return add_param_group


def _post_backward(self: Optimizer, scaler: LossScaler) -> None:
    gradients.finish(self, scaler, scaler.loss_scale())


def _create_masters(self: Optimizer) -> None:
    stash_of(self).create_masters(self)


def _copy_to_model(self: Optimizer) -> None:
    stash_of(self).copy_to_model()
