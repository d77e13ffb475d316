"""``FusedMixedPrecisionLamb``: LAMB that keeps its own masters and takes the loss scale from a GradScaler."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from harness.apex.optimizers.fused import REDUCED, FusedOptimizer, check_options, own_tensor, refuse_amsgrad
from harness.apex.optimizers.fused_lamb import apply_lamb, clip_factor


class FusedMixedPrecisionLamb(FusedOptimizer):
    """LAMB as in ``FusedLAMB`` (which see for the other arguments), for models in reduced precision.

    Parameters of ``reduced_precision_dtype`` (torch.float16 or torch.bfloat16) have float32 masters in the state; a
    parameter that something else wrote to hands its value to its master. ``lr`` and ``step`` (the number of steps
    taken already) are tensors in each group.

    With ``torch.amp.GradScaler``, ``scaler.step(optimizer)`` leaves unscaling and skipping to this class: no host
    sync, and the gradients themselves stay scaled. Without a GradScaler gradients are taken as they are.
    """

    settings = ("set_grad_none", "adam_w_mode", "use_nvlamb", "reduced_precision_dtype")
    capturable = True
    _step_supports_amp_scaling = True

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
        name = "FusedMixedPrecisionLamb"
        refuse_amsgrad(name, amsgrad)
        check_options(
            name, betas, lr=lr, step=step, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm or 0.0
        )
        if reduced_precision_dtype not in (None, *REDUCED):
            raise ValueError(
                f"{name} was given reduced_precision_dtype={reduced_precision_dtype!r}; allowed are torch.float16, "
                "torch.bfloat16 and None (no masters)."
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
        super().__init__(params, defaults)

    @property
    def mastered(self) -> Collection[torch.dtype]:  # type: ignore[override]
        return () if self.reduced_precision_dtype is None else (self.reduced_precision_dtype,)

    def step(self, closure: Callable[[], float] | None = None, **unsupported: Any) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient. Returns what ``closure``, if given, returned.

        ``grad_scaler`` is no parameter here: GradScaler hands its scale and verdict over by attributes.
        """
        if any(value is not None for value in unsupported.values()):
            raise RuntimeError(
                f"FusedMixedPrecisionLamb.step() was given {', '.join(unsupported)}; only a closure is allowed. For a "
                "torch.amp.GradScaler call scaler.step(optimizer)."
            )
        return super().step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with options of its own; what it does not name is as in the constructor."""
        super().add_param_group(param_group)
        self._adopt_loaded(self.param_groups[-1])

    def _update(self) -> None:
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        inv_scale = 1.0 if grad_scale is None else grad_scale.double().reciprocal().float()
        factor = clip_factor(self, inv_scale)
        for group in self.param_groups:
            if group["params"]:
                group["step"] += 1 if found_inf is None else (found_inf == 0).to(group["step"].device)
                apply_lamb(self, group, factor, found_inf)

    def _adopt_loaded(self, group: dict[str, Any]) -> None:
        group["lr"] = own_tensor(group["lr"], group, torch.float32)
        group["step"] = own_tensor(group["step"], group, torch.int32, (1,))
