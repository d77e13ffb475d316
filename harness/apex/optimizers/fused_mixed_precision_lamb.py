"""``FusedMixedPrecisionLamb``: LAMB that keeps its own masters and takes the loss scale from a GradScaler."""

from __future__ import annotations

from typing import Any

import torch

from harness.apex.dtypes import REDUCED
from harness.apex.optimizers.fused_lamb import LambOptimizer


class FusedMixedPrecisionLamb(LambOptimizer):
    """LAMB for models in reduced precision. See ``FusedLAMB`` for the arguments that both share.

    Parameters of ``reduced_precision_dtype`` (torch.float16 or torch.bfloat16) have float32 masters in the state. If
    other code writes to such a parameter, its master takes the new value. ``lr`` and ``step`` (the number of steps
    already taken) are tensors in each group.

    With ``torch.amp.GradScaler``, ``scaler.step(optimizer)`` leaves unscaling and skipping to this class: no host
    sync, and the gradients themselves stay scaled. Without a GradScaler, gradients are used as they are.
    """

    settings = ("set_grad_none", "adam_w_mode", "use_nvlamb", "reduced_precision_dtype")
    capturable = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        if reduced_precision_dtype not in (None, *REDUCED):
            raise ValueError(
                f"FusedMixedPrecisionLamb was given reduced_precision_dtype={reduced_precision_dtype!r}; it must be "
                "torch.float16, torch.bfloat16 or None (no masters)."
            )
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb
        self.reduced_precision_dtype = reduced_precision_dtype
        defaults = dict(
            lr=lr,
            step=step,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
        )
        super().__init__(params, defaults, amsgrad=amsgrad)

    @property
    def mastered(self) -> tuple[torch.dtype, ...]:  # type: ignore[override]
        """The dtype whose parameters have masters. Scripts set ``reduced_precision_dtype`` after construction, too."""
        return () if self.reduced_precision_dtype is None else (self.reduced_precision_dtype,)
