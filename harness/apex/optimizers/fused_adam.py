"""``FusedAdam``: Adam and AdamW with Apex's arguments and state. Its kernels are torch's own fused ones."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from harness.apex.optimizers.fused import (
    REDUCED,
    Batch,
    FusedOptimizer,
    check_options,
    count_for_kernel,
    own_tensor,
    refuse_amsgrad,
)


class FusedAdam(FusedOptimizer):
    """Adam, with decoupled weight decay by default.

    Kingma and Ba, Adam, https://arxiv.org/abs/1412.6980; Loshchilov and Hutter, Decoupled Weight Decay
    Regularization, https://arxiv.org/abs/1711.05101.

    ``adam_w_mode=False`` adds the weight decay to the gradient instead; ``bias_correction=False`` takes the moments as
    they are. Moments ``exp_avg`` and ``exp_avg_sq`` are float32 for float16 and bfloat16 parameters; ``step`` is
    counted per group and kept there.

    ``capturable=True`` keeps ``lr`` and ``step`` of each group in tensors, so that ``step()`` may be captured into a
    CUDA graph, and takes unscaling and skipping over from ``torch.amp.GradScaler``, without a host sync.
    ``master_weights=True`` (with ``capturable`` only) keeps float32 masters of float16 and bfloat16 parameters in the
    state; a parameter that something else wrote to hands its value to its master.
    """

    settings = ("set_grad_none", "adam_w_mode", "capturable", "master_weights")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        refuse_amsgrad("FusedAdam", amsgrad)
        if master_weights and not capturable:
            raise RuntimeError(
                "FusedAdam was given master_weights=True without capturable=True. Add capturable=True, or leave the "
                'masters to amp.initialize(model, optimizer, opt_level="O2").'
            )
        check_options("FusedAdam", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        self.adam_w_mode = adam_w_mode
        self.capturable = capturable
        self.master_weights = master_weights
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults, set_grad_none)

    @property
    def mastered(self) -> Collection[torch.dtype]:  # type: ignore[override]
        return REDUCED if self.master_weights else ()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self.capturable

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        grads: None = None,
        output_params: None = None,
        scale: None = None,
        grad_norms: None = None,
        **unsupported: Any,
    ) -> float | None:
        """Update the parameters that have a gradient. Returns what ``closure``, if given, returned.

        The other arguments are those of a FusedAdam before 2019; anything but None raises RuntimeError. So does
        ``grad_scaler``, which is no named parameter because GradScaler would warn about it in every step: it hands
        its scale and verdict to a capturable optimizer by attributes.
        """
        unsupported.update(grads=grads, output_params=output_params, scale=scale, grad_norms=grad_norms)
        given = [name for name, value in unsupported.items() if value is not None]
        if given:
            raise RuntimeError(
                f"FusedAdam.step() was given {', '.join(given)}; only a closure is allowed. Leave the rest to "
                "amp.scale_loss, or to torch.amp.GradScaler: scaler.step(optimizer)."
            )
        return super().step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with options of its own; what it does not name is as in the constructor."""
        super().add_param_group(param_group)
        self._host(self.param_groups[-1])

    def _update(self) -> None:
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if group["params"]:
                self._count(group, found_inf)
                for batch in self._batches(group):
                    self._update_batch(group, batch, found_inf)
                    self._write_back(batch)

    def _count(self, group: dict[str, Any], found_inf: Tensor | None) -> None:
        if not self.capturable:
            group["step"] = group.get("step", 0) + 1
            return
        if "step" not in group:
            group["step"] = torch.zeros(1, dtype=torch.int32, device=group["params"][0].device)
        group["step"] += 1 if found_inf is None else (found_inf == 0).to(group["step"].device)

    def _update_batch(self, group: dict[str, Any], batch: Batch, found_inf: Tensor | None) -> None:
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        device = batch.device
        lr = group["lr"]
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        kernel(
            batch.weights,
            batch.grads,
            self._moments(batch, "exp_avg"),
            self._moments(batch, "exp_avg_sq"),
            [],
            [count_for_kernel(group, device)] * len(batch.weights),
            lr=lr.to(device) if isinstance(lr, Tensor) else lr,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=None if grad_scale is None else grad_scale.to(device),
            # the kernel looks for exactly 1, and GradScaler adds up the verdicts of all devices
            found_inf=None if found_inf is None else (found_inf != 0).to(device, torch.float32),
        )

    def _adopt_loaded(self, group: dict[str, Any]) -> None:
        if "step" not in group:  # saved by torch.optim.Adam or AdamW, which count per parameter
            states = [self.state[param] for param in group["params"] if param in self.state]
            counts = [state.pop("step") for state in states if "step" in state]
            if counts:
                group["step"] = max(int(count) for count in counts)
        self._host(group)

    def _host(self, group: dict[str, Any]) -> None:
        """Have ``lr`` and ``step`` in tensors if capturable, else as numbers."""
        if self.capturable:
            group["lr"] = own_tensor(group["lr"], group, torch.float32)
            if "step" in group:
                group["step"] = own_tensor(group["step"], group, torch.int32, (1,))
        elif isinstance(group.get("step"), Tensor):
            group["step"] = int(group["step"])
            group["lr"] = float(group["lr"])
