"""``FP16_Optimizer`` as Apex had it for its fused optimizers: one flat float32 master per parameter group.

``from apex.optimizers import FP16_Optimizer, FusedAdam`` was the float16 recipe of the BERT scripts of 2018 and 2019;
later Apex had it in ``apex.contrib.optimizers``. It differs from ``fp16_utils.FP16_Optimizer`` in three ways that
scripts rely on: gradients are read in ``step()``, so that code between ``backward()`` and ``step()`` can reduce or
clip them; ``step()`` passes ``grads``, ``scale`` and ``grad_norms`` to an optimizer that takes them; and attributes and
state dict are flat.

Differences from Apex: it is a ``torch.optim.Optimizer``, so schedulers accept it; it works with any optimizer, on any
device, and for groups of mixed dtypes; frozen parameters stay as they are; model weights written after its creation
survive the next step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.apex.amp.master_weights import Versions, follow
from harness.apex.fp16_utils.fp16_optimizer import ScalingOptimizer, check_fit
from harness.apex.fp16_utils.loss_scaler import DynamicLossScaler
from harness.apex.optimizers.batch import Group
from harness.apex.optimizers.fused_optimizer import FusedOptimizer
from harness.apex.tensor_groups import flatten, norms, unflatten

_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


def _of_scaler(name: str) -> Any:
    return property(
        lambda self: getattr(self.loss_scaler, name), lambda self, value: setattr(self.loss_scaler, name, value)
    )


class FP16_Optimizer(ScalingOptimizer):
    """``init_optimizer`` on flat float32 copies of its parameters, with loss scaling.

        optimizer = FusedAdam(model.half().parameters(), lr=5e-5, bias_correction=False, max_grad_norm=1.0)
        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
        optimizer.backward(loss)  # instead of loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    The scale is ``static_loss_scale``, or with ``dynamic_loss_scale`` starts at 2**16, halves on overflow and doubles
    after 1000 steps without. ``dynamic_loss_args`` (``init_scale``, ``scale_factor``, ``scale_window``) replace these
    values; Apex refused them. A missing gradient counts as zero. ``step()`` skips gradients that hold an inf or NaN,
    and waits for the device to see it. ``verbose``: log skipped steps, on rank 0.

    Attributes: ``fp16_groups``, the model's trainable parameters by group; ``fp32_groups_flat``, their masters, one
    vector per group; ``cur_scale``, ``cur_iter``, ``last_overflow_iter``, ``scale_factor``, ``scale_window``;
    ``overflow``, True if the latest step was skipped.
    """

    drops_gradients = True
    cur_scale, cur_iter, last_overflow_iter, scale_factor, scale_window = map(_of_scaler, _SCALER_STATE)

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        arguments = {"init_scale": 2.0**16, **dict(dynamic_loss_args or {})} if dynamic_loss_scale else {}
        super().__init__(init_optimizer, DynamicLossScaler(**arguments), dynamic_loss_scale, verbose)
        if not dynamic_loss_scale:
            self.cur_scale = static_loss_scale
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_groups_flat: list[Tensor] = []
        self._versions = Versions()
        for group in init_optimizer.param_groups:
            self._adopt(group)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, which gets a master of its own."""
        self.optimizer.add_param_group(param_group)
        self._adopt(self.optimizer.param_groups[-1])

    def _adopt(self, group: Group) -> None:
        model = [param for param in group["params"] if param.requires_grad]
        device = next((param.device for param in group["params"]), None)
        flat = flatten([param.detach().float() for param in model]) if model else torch.zeros(0, device=device)
        group["params"] = [flat.requires_grad_()]
        self.fp16_groups.append(model)
        self.fp32_groups_flat.append(flat)
        self._versions.record(model)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of ``loss`` times the scale; gradients add up, scaled, until ``zero_grad``."""
        self.loss_scaler.backward(loss.float())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step the masters and copy them to the model, or skip the step on overflow. Returns None.

        Raises RuntimeError if a closure is given.
        """
        if closure is not None:
            raise RuntimeError(
                "This FP16_Optimizer does not take a closure. Use fp16_utils.FP16_Optimizer, or call step() without it."
            )
        self._refresh()
        grads = list(map(self._flat_gradient, self.fp16_groups, self.fp32_groups_flat))
        sizes = torch.stack([norms([grad])[0].to(grads[0].device) for grad in grads]).tolist()
        self.overflow = not all(map(math.isfinite, sizes))
        if self.overflow:
            self._reduce_scale("the step is skipped")
        else:
            self._step_masters(grads, sizes)
            self._copy_to_model()
            self._update_scale(False)

    def _update_scale(self, overflow: bool) -> None:
        scale = self.cur_scale
        super()._update_scale(overflow)
        if not self.dynamic_loss_scale:
            self.cur_scale = scale

    def _step_masters(self, grads: list[Tensor], grad_norms: list[float]) -> None:
        step: Any = self.optimizer.step
        takes_grads = "grads" in inspect.signature(step).parameters and not isinstance(self.optimizer, FusedOptimizer)
        if takes_grads:
            step(grads=[[grad] for grad in grads], scale=self.cur_scale, grad_norms=grad_norms)
            return
        for master, grad in zip(self.fp32_groups_flat, grads, strict=True):
            master.grad = grad.div_(self.cur_scale)
        step()
        for master in self.fp32_groups_flat:
            master.grad = None

    @staticmethod
    def _flat_gradient(group: list[Tensor], master: Tensor) -> Tensor:
        parts = [torch.zeros_like(param) if param.grad is None else param.grad for param in group]
        return flatten([part.detach().float() for part in parts]) if parts else torch.zeros_like(master)

    def _refresh(self) -> None:
        """Let weights of the model that were written since the last step decide (see ``amp.master_weights``)."""
        for model, flat in zip(self.fp16_groups, self.fp32_groups_flat, strict=True):
            for param, master in zip(model, unflatten(flat.detach(), model), strict=True):
                if self._versions.has_changed(param):
                    follow(master, param)

    @torch.no_grad()
    def _copy_to_model(self) -> None:
        for model, flat in zip(self.fp16_groups, self.fp32_groups_flat, strict=True):
            if model:
                torch._foreach_copy_(model, unflatten(flat, model))
                self._versions.record(model)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return plain data under Apex's keys: scaler, inner optimizer, flat masters (aliases, not copies)."""
        self._refresh()
        return {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            **{name: getattr(self, name) for name in _SCALER_STATE},
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups_flat": [flat.detach() for flat in self.fp32_groups_flat],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore what ``state_dict`` saved, here or in Apex, and copy the masters to the model.

        Raises ValueError, before anything is changed, if the masters do not fit.
        """
        saved = state_dict["fp32_groups_flat"]
        check_fit([[flat] for flat in saved], [[flat] for flat in self.fp32_groups_flat])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.dynamic_loss_scale = bool(state_dict["dynamic_loss_scale"])
        for name in set(_SCALER_STATE) & set(state_dict):  # Apex saved only the first two of a static scale
            setattr(self, name, state_dict[name])
        for flat, value in zip(self.fp32_groups_flat, saved, strict=True):
            flat.copy_(value)
        self._copy_to_model()
