"""The loss scaler: one scale, its growth and back-off, and the unscaling of gradients (contract 2).

A scale is plain host data. The only device-to-host sync is in ``update_scale`` of a dynamic scaler; a static scaler
has none, nor has ``update_on_device``, after which the host follows later (see ``device_flags``). Which gradients
belong to which context is decided in ``gradients``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.apex.amp.device_flags import flags
from harness.apex.amp.levels import LossScale
from harness.apex.amp.messages import messages
from harness.apex.tensor_groups import by_device_and_dtype

INITIAL_SCALE = 2.0**16
MAXIMUM = 2.0**24
FACTOR = 2.0
WINDOW = 2000  # clean updates between two growths
DEFAULT_FLOOR = 1.0  # Apex had none and walked down to a division by zero (contract 2.2)
LOWEST_FLOOR = 2.0**-126  # for min_loss_scale=0: the smallest scale whose inverse is finite in float32
COMPLAIN_EVERY = 50  # consecutive overflows between two warnings that training has stopped


def lowered(scale: float, factor: float, floor: float) -> float:
    """Return the scale after an overflow; a ``floor`` does not raise a lower one that a script or checkpoint wrote."""
    return min(scale, max(floor, scale / factor))


def raised(scale: float, factor: float, maximum: float) -> float:
    """Return the scale after enough steps without an overflow."""
    return min(maximum, scale * factor)


def _checkable(gradients: list[Tensor]) -> list[Tensor]:
    """Return ``gradients``, of one kind, or float32 copies where torch's kernel that checks and unscales lacks their
    dtype: bfloat16 on CUDA."""
    if gradients[0].dtype is torch.bfloat16 and gradients[0].is_cuda:
        return [gradient.float() for gradient in gradients]
    return gradients


class LossScaler:
    """Scale for one loss.

    A dynamic scale starts at ``min(max_loss_scale, 2**16)``, but not below the floor, halves on overflow, and doubles
    after 2000 clean updates. The floor is ``min_loss_scale``: 1.0 when None, 2**-126 when 0. A static scale is the
    number given; it counts updates but never skips.
    """

    def __init__(
        self,
        loss_scale: LossScale,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = MAXIMUM,
        index: int = 0,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self.index = index
        self._max = float("inf") if max_loss_scale is None else float(max_loss_scale)
        self._min = DEFAULT_FLOOR if min_loss_scale is None else max(float(min_loss_scale), LOWEST_FLOOR)
        if self.dynamic and self._min > self._max and min_loss_scale is not None:
            raise ValueError(
                f"min_loss_scale={min_loss_scale} is above max_loss_scale={max_loss_scale}; the dynamic loss scale "
                "must fit between them. Lower the first or raise the second."
            )
        self._min = min(self._min, self._max)
        self._scale = max(self._min, min(self._max, INITIAL_SCALE)) if self.dynamic else float(loss_scale)
        self._clean = 0
        self._on_device: tuple[Tensor, Tensor] | None = None  # scale and count, if the host's follow later
        self._has_overflow = False
        self._found_inf: dict[torch.device, Tensor] = {}  # not 0 if a gradient on that device was inf or NaN
        self._apex_flag: Tensor | None = None  # _overflow_buf, once a script has asked for it
        self._inverse: dict[torch.device, tuple[float, Tensor]] = {}
        self._deferred = 0
        self._in_a_row = 0

    def loss_scale(self) -> float:
        """Return the scale by which the next loss is multiplied."""
        return self._loss_scale

    @property
    def _loss_scale(self) -> float:
        """The scale, which scripts read and write."""
        flags.read_flags()
        return self._scale

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        flags.read_flags()
        self._scale, self._on_device = value, None

    @property
    def _unskipped(self) -> int:
        """Clean updates since the last change of the scale, which scripts read and write."""
        flags.read_flags()
        return self._clean

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        flags.read_flags()
        self._clean, self._on_device = value, None

    @property
    def factor(self) -> float | Tensor:
        """The scale of the next loss: a float64 scalar on the device, where it may be newer than the host's."""
        return self._scale if self._on_device is None else self._on_device[0]

    @property
    def device_of_flag(self) -> torch.device | None:
        """The device that knows alone whether this context overflowed; None if the host must find out."""
        known_elsewhere = self._has_overflow or self._apex_flag is not None or self._deferred
        return (
            next(iter(self._found_inf)) if self.dynamic and not known_elsewhere and len(self._found_inf) == 1 else None
        )

    @property
    def _overflow_buf(self) -> Tensor:
        """Apex's flag, one int32: not 0 if an inf or NaN was found since the last clear.

        Loops that unscale by themselves pass it to ``multi_tensor_applier`` or replace it. ``update_scale`` reads it.
        """
        if self._apex_flag is None:
            device = next(iter(self._found_inf), torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            self._apex_flag = torch.zeros(1, dtype=torch.int32, device=device)
        for found in self._found_inf.values():
            self._apex_flag.masked_fill_(found.to(self._apex_flag.device) != 0, 1)
        return self._apex_flag

    @_overflow_buf.setter
    def _overflow_buf(self, flag: Tensor) -> None:
        self._apex_flag = flag

    def clear_overflow_state(self) -> None:
        """Forget that an inf or NaN was found."""
        self._has_overflow = False
        for found in (*self._found_inf.values(), *self._apex_flags()):
            found.zero_()

    def _apex_flags(self) -> list[Tensor]:
        return [] if self._apex_flag is None else [self._apex_flag]

    def unscale_(self, gradients: Sequence[Tensor], scale: float | Tensor) -> None:
        """Divide dense ``gradients`` by ``scale`` in place; a dynamic scaler also notes any inf or NaN among them.

        One pass over the gradients of each device and dtype. Collective for a dynamic scaler and DTensors, as under
        fsdp: torch then takes the largest flag over the ranks that hold their shards.
        """
        inverse = 1.0 / scale
        if not self.dynamic and inverse == 1.0:
            return
        for group in by_device_and_dtype(gradients):
            if self.dynamic:
                found, factor = self._buffers(group[0].device, inverse)
                wide = _checkable(group)
                torch._amp_foreach_non_finite_check_and_unscale_(wide, found, factor)
                if wide is not group:
                    torch._foreach_copy_(group, wide)
            else:
                torch._foreach_mul_(group, float(inverse))

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: float | None = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write ``model_grads`` divided by the scale into ``master_grads`` and note overflow. Apex's method.

        ``scale_override`` replaces the scale. ``unused_scale`` has no effect in Apex either, and ``models_are_masters``
        none here.
        """
        torch._foreach_copy_(list(master_grads), list(model_grads))
        self.unscale_(master_grads, self._loss_scale if scale_override is None else scale_override)

    def defer(self) -> None:
        """End a context whose gradients are still local to this rank: the context that reduces them is checked."""
        flags.read_flags()  # of steps before, whose ``count`` would end this one too
        self._deferred += 1
        self.clear_overflow_state()

    def update_scale(self) -> bool:
        """Update the scale after a context and those deferred to it; return True if the step must be skipped.

        A dynamic scaler reads the overflow flag from the device: the one sync point of amp.
        """
        flags.read_flags()
        self._on_device = None
        if self.dynamic and not self._has_overflow:
            self._has_overflow = any(found.item() for found in (*self._found_inf.values(), *self._apex_flags()))
        return self.count(self._has_overflow)

    def update_on_device(self) -> Tensor:
        """Update the scale after a context, on the device of its flag, and return the flag: not 0 if it overflowed."""
        device, found = self._found_inf.popitem()  # the next context gets a flag of its own: this one is read later
        if self._on_device is None:
            dtypes = torch.float64, torch.int64  # float64 as on the host
            before = zip((self._scale, self._clean), dtypes, strict=True)
            scale, clean = (torch.full((), value, dtype=dtype, device=device) for value, dtype in before)
        else:
            scale, clean = self._on_device
        overflow = found != 0
        clean = (clean + 1).masked_fill(overflow, 0)
        grows = clean >= WINDOW
        # lowered() and raised(), in tensors
        lower = torch.minimum(scale, (scale / FACTOR).clamp(min=self._min))
        higher = (scale * FACTOR).clamp(max=self._max)
        self._on_device = torch.where(overflow, lower, torch.where(grows, higher, scale)), clean.masked_fill(grows, 0)
        return found

    def count(self, overflow: bool) -> bool:
        """Update the scale after a context with or without an ``overflow``; return True if the step is skipped."""
        contexts, self._deferred = self._deferred + 1, 0
        if self.dynamic and overflow:
            self._back_off()
            return True
        self._in_a_row = 0
        for _ in range(contexts):
            self._clean += 1
            if self.dynamic and self._clean >= WINDOW:  # a script or a checkpoint may have set it higher
                self._scale = raised(self._scale, FACTOR, self._max)
                self._clean = 0
        return False

    def _back_off(self) -> None:
        before, self._clean = self._scale, 0
        self._scale = lowered(before, FACTOR, self._min)
        self._in_a_row += 1
        if self._scale != before:
            messages.warn(
                f"Gradient overflow: the next optimizer step is skipped; loss scaler {self.index} "
                f"reduces the loss scale from {before:g} to {self._scale:g}"
            )
        if self._scale <= self._min and (self._scale != before or self._in_a_row % COMPLAIN_EVERY == 0):
            messages.warn(
                f"Loss scaler {self.index} is at its floor of {self._min:g} (overflows in a row: {self._in_a_row}): "
                "the scale is not lowered further, and steps are skipped until gradients are finite. Usually the loss "
                "is inf or NaN (check data and learning rate), or zero_grad() was not called after a skipped step. "
                f"If the loss is finite but large, use amp.initialize(..., min_loss_scale={self._min / 1024:g}).",
                always=True,
            )

    def _buffers(self, device: torch.device, inverse: float | Tensor) -> tuple[Tensor, Tensor]:
        if device not in self._found_inf:
            # 0-dim: DTensors take it as equal on all ranks
            self._found_inf[device] = torch.zeros((), dtype=torch.float32, device=device)
        if isinstance(inverse, Tensor):
            return self._found_inf[device], inverse.to(device, torch.float32)
        cached = self._inverse.get(device)
        if cached is None or cached[0] != inverse:
            self._inverse[device] = cached = (inverse, torch.full_like(self._found_inf[device], inverse))
        return self._found_inf[device], cached[1]
