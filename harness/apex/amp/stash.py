"""``optimizer._amp_stash``: what amp keeps about one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from harness.apex.accumulated_gradients import take_aside
from harness.apex.amp.device_flags import flags, skips_on_device
from harness.apex.amp.master_weights import MasterWeights
from harness.apex.amp.scaler import LossScaler


class AmpStash(MasterWeights):
    """The masters of an optimizer, if its level has them, and the state of its next step."""

    def __init__(self, master_weights: bool) -> None:
        super().__init__()
        self.master_weights = master_weights
        self.skips = False  # the next step, as far as the host knows
        self.flag: Tensor | None = None  # if not None, it decides on the device whether the next step is skipped
        self.lazy_init_called = not master_weights
        self.params_have_scaled_gradients = False  # those of delayed contexts wait to be unscaled
        self.scaled_by: float | Tensor = 1.0  # their scale
        self.deferred_to: LossScaler | None = None  # its overflow check waits for a reduction over ranks
        self.undo: list[Callable[..., Any]] = []

    def create_masters(self, optimizer: Optimizer) -> None:
        """Give ``optimizer`` its masters, once, at its first use; gradients that already exist are kept."""
        if not self.lazy_init_called:
            self.adopt_all(optimizer)
            self.lazy_init_called = True
            self.take_saved(optimizer)

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


def can_stay_on_device(optimizers: list[Optimizer], scaler: LossScaler) -> bool:
    """Return whether the host need not know now whether this context overflowed: the results are the same, bit for
    bit."""
    device = scaler.device_of_flag
    if device is None or device.type != "cuda":
        return False
    stashes = map(stash_of, optimizers)
    if any(stash.master_weights or stash.deferred_to is not None or stash.skips for stash in stashes):
        return False
    return all(skips_on_device(optimizer, device) for optimizer in optimizers)


def leave_on_device(stashes: list[AmpStash], scaler: LossScaler) -> None:
    """Let the optimizers skip the step on the device; the host hears of it later."""
    flag = scaler.update_on_device()
    for stash in stashes:
        stash.flag = flag

    def heard(overflow: bool) -> None:
        scaler.count(overflow)
        for stash in stashes:
            stash.hear(flag, overflow)

    flags.push(flag, heard)
