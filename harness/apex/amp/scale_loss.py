"""``amp.scale_loss``: the context around a backward pass (contract 1.3 of tests/apex/contract.py).

How an overflow skips a step: at the end of the context, ``gradients.finish`` unscales the gradients and notes in the
scaler whether one is infinite. The first of these that fits then decides:

deferred       gradients are not averaged over ranks yet, and ranks must decide alike: the context that averages them
               decides, or else ``step()`` (``optimizer_patches._check_step``)
on the device  the optimizers can skip there: ``device_flags.step_with_flag`` reads a flag, and the host hears of it
on the host    after an overflow, each optimizer is marked in its stash, amp's state of it, and ``step()`` of a marked
               one does nothing (``optimizer_patches._skip``)

The scaler counts each decision: the scale falls after an overflow, and may grow after many steps without one.

A second context before the step reads the first one's decision in ``gradients.prepare``. ``already_patched`` of a stash
waits for the device if only its flag knows; setting it drops the flag.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.apex.accumulated_gradients import any_unreduced
from harness.apex.amp import cast_engine, gradients
from harness.apex.amp.master_weights import all_params
from harness.apex.amp.scaler import LossScaler
from harness.apex.amp.stash import AmpStash, can_stay_on_device, leave_on_device, stash_of
from harness.apex.amp.state import _amp_state


def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Iterable[Optimizer],
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Tensor]:
    """Return a context that yields ``loss.float()`` times the loss scale and unscales gradients at its end.

    ``optimizers``: every optimizer that owns parameters this loss reaches, one or an iterable. ``loss_id`` picks the
    scaler. ``delay_unscale=True`` in all but the last micro-batch of a step leaves gradients scaled and accumulating.
    ``delay_overflow_check=True`` leaves the overflow check to the next context without it. ``model`` is accepted and
    ignored, as in Apex.

    After an overflow the next ``step()`` of each of ``optimizers`` does nothing; ``_amp_stash.already_patched`` is True
    until then. O1's casts are off inside, so the backward pass runs as the forward pass was recorded. If the body
    raises, gradients accumulated before are kept and those of this context dropped (kept too under ``delay_unscale``).
    """
    if not _amp_state.initialized:
        raise RuntimeError(
            "scale_loss was called but amp was never initialized (the internal Amp state has not been initialized). "
            "Call model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
        )
    if not _amp_state.opt_properties.enabled:
        return nullcontext(loss)
    chosen = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    scaler = _scaler(loss_id)
    if not scaler.dynamic and scaler.loss_scale() == 1.0 and not any(map(_has_masters, chosen)):
        return _unscaled(loss)
    return scaled(loss, chosen, scaler, delay_unscale, delay_overflow_check)


@contextmanager
def _unscaled(loss: Tensor) -> Iterator[Tensor]:
    with cast_engine.disable_casts():
        yield loss.float()


@contextmanager
def scaled(
    loss: Tensor,
    optimizers: list[Optimizer],
    scaler: LossScaler,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Do ``scale_loss`` with a given ``scaler``, without the shortcut for a static scale of 1."""
    scale = scaler.factor
    for optimizer in optimizers:
        stash_of(optimizer)  # raises for an optimizer that amp does not know, before gradients of another are set aside
    for optimizer in optimizers:
        gradients.prepare(optimizer, scale, delay_unscale)
    try:
        with cast_engine.disable_casts():
            yield loss.float() * (scale.to(loss.device, torch.float32) if isinstance(scale, Tensor) else scale)
    except BaseException:
        for optimizer in optimizers:
            gradients.mark_delayed(optimizer, scale) if delay_unscale else gradients.restore(optimizer)
        raise
    for optimizer in optimizers:
        gradients.mark_delayed(optimizer, scale) if delay_unscale else gradients.finish(optimizer, scaler, scale)
    if delay_overflow_check:
        scaler.clear_overflow_state()
    elif not delay_unscale:
        _decide(optimizers, scaler)


def _decide(optimizers: list[Optimizer], scaler: LossScaler) -> None:
    """Decide whether the next step is skipped, or leave that to another, as above."""
    stashes = [stash_of(optimizer) for optimizer in optimizers]
    model_params = itertools.chain(*(stash.all_fp16_params for stash in stashes), *map(all_params, optimizers))
    if any_unreduced(model_params):
        scaler.defer()
        for stash in stashes:
            stash.deferred_to = scaler
    elif can_stay_on_device(optimizers, scaler):
        leave_on_device(stashes, scaler)
    else:
        if skip := scaler.update_scale():
            scaler.clear_overflow_state()  # clear otherwise, unless the scale is static
        for stash in stashes:
            stash.deferred_to = None
            stash.already_patched |= skip  # marks it; the name is Apex's


def _scaler(loss_id: int) -> LossScaler:
    try:
        return _amp_state.loss_scalers[loss_id]
    except IndexError:
        count = len(_amp_state.loss_scalers)
        raise IndexError(
            f"loss_id={loss_id}, but amp was initialized for {count} loss{'es' if count > 1 else ''} (largest loss_id: "
            f"{count - 1}). Use amp.initialize(..., num_losses={loss_id + 1})."
        ) from None


def _has_masters(optimizer: Optimizer) -> bool:
    stash = getattr(optimizer, "_amp_stash", None)
    return isinstance(stash, AmpStash) and stash.master_weights
