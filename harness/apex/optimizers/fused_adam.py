"""``FusedAdam``: Adam and AdamW with Apex's arguments and state, on torch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.apex.dtypes import REDUCED, wide
from harness.apex.optimizers.batch import Group, ParameterBatch, copied_where_new
from harness.apex.optimizers.fused_optimizer import FusedOptimizer
from harness.apex.optimizers.step_count import step_for_kernel
from harness.apex.tensor_groups import by_device_and_dtype, global_norm


class FusedAdam(FusedOptimizer):
    """Adam, with decoupled weight decay by default.

    Kingma and Ba, Adam, https://arxiv.org/abs/1412.6980; Loshchilov and Hutter, Decoupled Weight Decay
    Regularization, https://arxiv.org/abs/1711.05101.

    ``adam_w_mode=False`` adds the weight decay to the gradient instead; ``bias_correction=False`` uses the moments
    uncorrected. Moments ``exp_avg`` and ``exp_avg_sq`` are float32 for float16 and bfloat16 parameters; ``step`` is
    counted per group and kept there.

    ``capturable=True`` keeps ``lr`` and ``step`` of each group in tensors, so that ``step()`` may be captured into a
    CUDA graph, and takes unscaling and skipping over from ``torch.amp.GradScaler``, without a host sync.
    ``master_weights=True`` (only with ``capturable``) keeps float32 masters of float16 and bfloat16 parameters in the
    state. If other code writes to such a parameter, its master takes the new value.

    ``max_grad_norm``, an argument of 2018, clips the gradients of each group to that norm; 0 and None do not.
    """

    settings = ("set_grad_none", "adam_w_mode", "capturable", "master_weights", "mastered")

    @property
    def state_key_for_device_skip(self) -> str | None:  # type: ignore[override]
        """See ``FusedOptimizer``; clipping by ``max_grad_norm`` would change gradients."""
        return None if any(group.get("max_grad_norm") for group in self.param_groups) else "exp_avg"

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
        *,
        max_grad_norm: float | None = 0.0,
    ) -> None:
        if master_weights and not capturable:
            raise RuntimeError(
                "FusedAdam was given master_weights=True without capturable=True. Add capturable=True, or leave the "
                'masters to amp.initialize(model, optimizer, opt_level="O2").'
            )
        self.adam_w_mode = adam_w_mode
        self.capturable = capturable
        self.master_weights = master_weights
        self.mastered = REDUCED if master_weights else ()
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        if max_grad_norm:
            defaults["max_grad_norm"] = max_grad_norm
        super().__init__(params, defaults, set_grad_none, amsgrad)

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        grads: None = None,
        output_params: None = None,
        scale: None = None,
        grad_norms: None = None,
        **unsupported: Any,
    ) -> float | None:
        """Update the parameters that have a gradient. Returns the result of ``closure``, if given.

        The other arguments belong to versions of FusedAdam before 2019; anything but None raises RuntimeError.
        """
        before_2019 = dict(grads=grads, output_params=output_params, scale=scale, grad_norms=grad_norms)
        return super().step(closure, **before_2019, **unsupported)

    def _update(self) -> None:
        for group in self._counted_groups():
            if max_norm := group.get("max_grad_norm"):
                self._clip(group["params"], max_norm)
            self._update_group(group)

    def _clip(self, params: list[Tensor], max_norm: float) -> None:
        """Clip the gradients of ``params``; norm and factor are float32 even for float16 and bfloat16 gradients."""
        grads = [param.grad for param in params if param.grad is not None and param.grad.numel()]
        grad_scale = self._grad_scale
        if grad_scale is None and not any(grad.dtype in REDUCED for grad in grads):
            torch.nn.utils.clip_grad_norm_(params, max_norm)
            return
        if not grads or any(grad.layout is not torch.strided for grad in grads):
            return  # sparse gradients are refused later
        norm = global_norm(grads)
        limit = max_norm if grad_scale is None else max_norm * grad_scale.to(norm.device)  # the gradients carry it
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for kind in by_device_and_dtype(grads):
            wide_grads = [grad.to(wide(grad)) for grad in kind]
            torch._foreach_copy_(kind, torch._foreach_mul(wide_grads, factor.to(kind[0].device, wide(kind[0]))))

    def _update_batch(self, group: Group, batch: ParameterBatch) -> None:
        moments = self._moments(batch, "exp_avg"), self._moments(batch, "exp_avg_sq")
        adam_update(group, batch.weights, batch.grads, *moments, self.adam_w_mode, self._grad_scale, self.found_inf)
        if self._grad_scale is not None:  # the kernel has unscaled batch.grads; scripts may clip or log p.grad
            grads = [param.grad for param in batch.params if param.grad is not None]
            copied_where_new(batch.grads, grads)

    def _adopt_loaded(self, group: Group) -> None:
        if "step" not in group:  # saved by torch.optim.Adam or AdamW, which count per parameter
            states = [self.state[param] for param in group["params"] if param in self.state]
            counts = [state.pop("step") for state in states if "step" in state]
            if counts:
                group["step"] = max(int(count) for count in counts)
        super()._adopt_loaded(group)


def adam_update(
    group: Group,
    weights: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    adam_w_mode: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update weights and moments in place, for tensors as in a ``ParameterBatch``.

    ``grads`` are divided by ``grad_scale`` in place. With a nonzero ``found_inf`` nothing changes.
    """
    device, lr = weights[0].device, group["lr"]
    kernel = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_
    kernel(
        weights,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step_for_kernel(group, device)] * len(weights),
        lr=lr.to(device) if isinstance(lr, Tensor) else lr,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=None if grad_scale is None else grad_scale.to(device),
        # the kernel checks for exactly 1, but GradScaler sums the flags of all devices
        found_inf=None if found_inf is None else (found_inf != 0).to(device, torch.float32),
    )
