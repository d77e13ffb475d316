"""The loss scalers of ``fp16_utils``: a static and a dynamic one. Those of ``amp`` are others, with other constants.

Their attributes are plain numbers under Apex's names, so what Apex saved (the objects themselves) can be read: a
pickled scaler of Apex is let through by ``torch.load``, also with ``weights_only=True``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.apex.amp.scaler import WINDOW
from harness.apex.amp.scaler import LossScaler as AmpLossScaler


class LossScaler:
    """A loss scale that stays as it is. It never looks for overflow."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of ``params`` holds an inf or NaN; a static scaler says no without looking."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """End a step; ``overflow`` says whether it was skipped."""

    def scale_gradient(self, module: nn.Module, grad_in: Any, grad_out: Any) -> tuple[Tensor | None, ...]:
        """Backward hook of a module: its input gradients times the scale."""
        return tuple(None if grad is None else grad * self.loss_scale for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward of ``loss`` times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that is divided on overflow, down to 1, and multiplied after steps without.

    ``init_scale``: where it starts; at 2**32 the first steps overflow until it has found its place. ``scale_factor``:
    of both changes. ``scale_window``: number of steps without overflow before it grows.
    """

    def __init__(self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        if not (init_scale > 0 and scale_factor > 1 and scale_window >= 1):
            raise ValueError(
                f"init_scale={init_scale} must be above 0, scale_factor={scale_factor} above 1, "
                f"scale_window={scale_window} at least 1"
            )
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of ``params`` holds an inf or NaN. Waits for the device, once for each."""
        return not _all_finite([param.grad for param in params if param.grad is not None])

    def update_scale(self, overflow: bool) -> None:
        """End a step; ``overflow`` says whether it was skipped."""
        if overflow:
            self.cur_scale = min(self.cur_scale, max(self.cur_scale / self.scale_factor, 1.0))
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        dense = tensor.coalesce().values() if tensor.is_sparse else tensor
        if dense.numel():
            by_kind[dense.device, dense.dtype].append(dense)
    # The largest absolute value cannot overflow, which a sum of squares of large gradients would.
    largest = [torch.stack(torch._foreach_norm(group, float("inf"))) for group in by_kind.values()]
    return all(bool(norms.isfinite().all()) for norms in largest)


def scaler_state(scaler: LossScaler) -> dict[str, float]:
    """``scaler`` as plain numbers."""
    return dict(vars(scaler))


def scaler_from(saved: Any) -> LossScaler:
    """The scaler saved as plain numbers by ``scaler_state``, or as an object by any version of Apex."""
    state: Mapping[str, Any] = saved if isinstance(saved, Mapping) else vars(saved)
    if "_loss_scale" in state:  # Apex from 2019 on saved the scaler of its amp here
        if not state.get("dynamic", True):
            return LossScaler(state["_loss_scale"])
        scaler = DynamicLossScaler(state["_loss_scale"], 2.0, state.get("_scale_seq_len", WINDOW))
        scaler.cur_iter = state.get("_unskipped", 0)
        return scaler
    if "cur_scale" not in state:
        raise ValueError(f"this is no loss scaler of fp16_utils: it has {', '.join(state) or 'nothing'}")
    if "cur_iter" not in state:
        return LossScaler(state["cur_scale"])
    scaler = DynamicLossScaler()
    for name in vars(scaler):
        setattr(scaler, name, state[name])
    return scaler


torch.serialization.add_safe_globals(
    [
        (LossScaler, "apex.fp16_utils.loss_scaler.LossScaler"),
        (DynamicLossScaler, "apex.fp16_utils.loss_scaler.DynamicLossScaler"),
        (AmpLossScaler, "apex.amp.scaler.LossScaler"),
    ]
)
