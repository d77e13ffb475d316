"""The static and the dynamic loss scaler of ``fp16_utils``. ``amp`` has its own, with other constants.

Their attributes are plain numbers under Apex's names, so the scaler objects that Apex saved can be read:
``torch.load`` accepts them, even with ``weights_only=True``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.apex.amp.scaler import LOWEST_FLOOR, WINDOW, lowered, raised
from harness.apex.amp.scaler import LossScaler as AmpLossScaler
from harness.apex.tensor_groups import by_device_and_dtype


class LossScaler:
    """A fixed loss scale. It never looks for overflow."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The factor of the loss."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False; a static scaler does not look."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """End a step, which was skipped if ``overflow`` is True."""

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of ``loss`` times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that is divided by ``scale_factor`` on overflow, and multiplied by it to grow, within two limits.

    It starts at ``init_scale``; at 2**32 the first steps overflow until it is small enough. It grows after
    ``scale_window`` steps without overflow. ``FP16_Optimizer`` has other defaults.
    """

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_loss_scale: float | None = 1.0,
        max_loss_scale: float | None = None,
    ) -> None:
        if not (init_scale > 0 and scale_factor > 1 and scale_window >= 1):
            raise ValueError(
                "init_scale must be above 0, scale_factor above 1 and scale_window at least 1; found "
                f"init_scale={init_scale}, scale_factor={scale_factor}, scale_window={scale_window}"
            )
        self.min_loss_scale = 1.0 if min_loss_scale is None else max(min_loss_scale, LOWEST_FLOOR)
        self.max_loss_scale = float("inf") if max_loss_scale is None else max_loss_scale
        super().__init__(min(init_scale, self.max_loss_scale))
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return True if a gradient of ``params`` holds an inf or NaN. Waits for each device."""
        return not _all_finite([param.grad for param in params if param.grad is not None])

    def update_scale(self, overflow: bool) -> None:
        """End a step, which was skipped if ``overflow`` is True."""
        if overflow:
            self.cur_scale = lowered(self.cur_scale, self.scale_factor, self.min_loss_scale)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale = raised(self.cur_scale, self.scale_factor, self.max_loss_scale)
        self.cur_iter += 1


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    dense = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    groups = by_device_and_dtype(tensor for tensor in dense if tensor.numel())
    # The largest absolute value cannot overflow; a sum of squares of large gradients would.
    largest = [torch.stack(torch._foreach_norm(group, float("inf"))) for group in groups]
    return all(bool(norms.isfinite().all()) for norms in largest)


def scaler_from(saved: Any) -> LossScaler:
    """Return the scaler saved as its plain numbers, or as an object by any version of Apex."""
    state: Mapping[str, Any] = saved if isinstance(saved, Mapping) else vars(saved)
    if "_loss_scale" in state:  # since 2019 Apex saved the scaler of its amp here
        if not state.get("dynamic", True):
            return LossScaler(state["_loss_scale"])
        limits = state.get("_min_loss_scale"), state.get("_max_loss_scale")
        scaler = DynamicLossScaler(state["_loss_scale"], 2.0, state.get("_scale_seq_len", WINDOW), *limits)
        scaler.cur_iter = state.get("_unskipped", 0)
        return scaler
    if "cur_scale" not in state:
        raise ValueError(f"This is not a loss scaler of fp16_utils: it has {', '.join(state) or 'nothing'}.")
    if "cur_iter" not in state:
        return LossScaler(state["cur_scale"])
    scaler = DynamicLossScaler()
    missing = vars(scaler).keys() - state.keys() - {"min_loss_scale", "max_loss_scale"}  # which Apex's does not have
    if missing:
        raise ValueError(f"This loss scaler of fp16_utils is incomplete: it has no {', '.join(sorted(missing))}.")
    for name in vars(scaler).keys() & state.keys():
        setattr(scaler, name, state[name])
    return scaler


torch.serialization.add_safe_globals(
    [
        (LossScaler, "apex.fp16_utils.loss_scaler.LossScaler"),
        (DynamicLossScaler, "apex.fp16_utils.loss_scaler.DynamicLossScaler"),
        (AmpLossScaler, "apex.amp.scaler.LossScaler"),
    ]
)
