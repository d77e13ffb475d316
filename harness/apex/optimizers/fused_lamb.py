"""``FusedLAMB``, and ``LambOptimizer``: the LAMB update that it shares with ``FusedMixedPrecisionLamb``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.apex.optimizers.batch import Group, cache_sized
from harness.apex.optimizers.fused_optimizer import FusedOptimizer
from harness.apex.optimizers.step_count import step_for_kernel
from harness.apex.tensor_groups import global_norm, norms, one_for_each


class LambOptimizer(FusedOptimizer):
    """The LAMB update, on torch's fused and foreach kernels."""

    adam_w_mode: bool
    use_nvlamb: bool

    def _update(self) -> None:
        grad_scale = self._grad_scale
        factor = self._clip_factor(1.0 if grad_scale is None else grad_scale.double().reciprocal().float())
        for group in self._counted_groups():
            self._update_scaled(group, factor, self.found_inf)

    def _clip_factor(self, inv_scale: Tensor | float) -> Tensor | float:
        """Return the factor for each gradient: ``inv_scale``, times what clips the global norm to ``max_grad_norm``."""
        params = [param for group in self.param_groups for param in group["params"]]
        grads = [param.grad for param in params if param.grad is not None and param.grad.numel()]
        max_norm = self.defaults["max_grad_norm"]
        if not max_norm or not grads or any(grad.layout is not torch.strided for grad in grads):
            return inv_scale  # sparse gradients are refused later
        norm = global_norm(grads)
        inv_scale = _on(inv_scale, norm.device)
        return (max_norm / (norm * inv_scale)).clamp(max=1.0) * inv_scale

    def _update_scaled(self, group: Group, factor: Tensor | float, found_inf: Tensor | None) -> None:
        """Update ``group`` from its gradients times ``factor``. With a nonzero ``found_inf`` nothing changes."""
        for batch in (part for whole in self._batches(group) for part in cache_sized(whole)):
            moments = self._moments(batch, "exp_avg"), self._moments(batch, "exp_avg_sq")
            skip = None if found_inf is None else (found_inf != 0).to(batch.device)
            updates = lamb_stage1(group, batch.weights, batch.grads, *moments, factor, self.adam_w_mode, skip)
            is_adapted = group["weight_decay"] != 0 or self.use_nvlamb
            both_norms = (norms(batch.weights), norms(updates)) if is_adapted else None
            lamb_stage2(batch.weights, updates, group["lr"], both_norms, skip)
            self._write_back(batch)


class FusedLAMB(LambOptimizer):
    """LAMB: Adam whose step for each tensor is scaled to the norm of that tensor.

    You et al., Large Batch Optimization for Deep Learning, https://arxiv.org/abs/1904.00962.

    All gradients are first divided by ``max(1, global norm / max_grad_norm)``. The norm is over all groups, and the
    constructor's ``max_grad_norm`` applies (None or 0: no clipping). The trust ratio ``|w| / |update|`` applies where
    ``weight_decay`` is not 0, or everywhere with ``use_nvlamb=True``. ``adam_w_mode=False`` adds the weight decay to
    the gradient; ``grad_averaging=False`` adds gradients to ``exp_avg`` with weight 1 instead of ``1 - beta1``.

    Moments are float32 for float16 and bfloat16 parameters; ``step`` is counted per group. Unlike Apex's, which left
    the update in ``p.grad``, this one does not change the gradients.
    """

    settings = ("set_grad_none", "adam_w_mode", "use_nvlamb")
    state_key_for_device_skip = "exp_avg"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb
        defaults = dict(
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
        )
        super().__init__(params, defaults, set_grad_none, amsgrad)


def lamb_stage1(
    group: Group,
    weights: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    factor: Tensor | float,
    adam_w_mode: bool,
    skip: Tensor | None = None,
) -> list[Tensor]:
    """Advance the moments by ``grads * factor``. Returns the updates, without ``lr`` and trust ratio, as new tensors.

    The tensors are as in a ``ParameterBatch``. ``group["weight_decay"]`` may be a tensor with a value for each weight.
    Where the scalar ``skip`` is true, the moments stay.
    """
    grads = list(torch._foreach_mul(grads, _on(factor, grads[0].device, grads[0].dtype)))
    decay = group["weight_decay"]
    if not adam_w_mode:
        _add_decay(grads, weights, decay)
    updates = _adam_updates(group, grads, exp_avgs, exp_avg_sqs, skip)
    if adam_w_mode:
        _add_decay(updates, weights, decay)
    return updates


def lamb_stage2(
    weights: list[Tensor],
    updates: list[Tensor],
    lr: Tensor | float,
    weight_and_update_norms: tuple[Tensor, Tensor] | None = None,
    skip: Tensor | None = None,
) -> None:
    """Subtract ``updates`` times ``lr`` times, given the norms, the trust ratios. Overwrites ``updates``.

    The trust ratio is ``|weight| / |update|``, or 1 if one of them is 0. Norms have the shape ``(len(weights),)``.
    """
    rate: Any = _on(lr, weights[0].device, weights[0].dtype)
    if skip is not None:
        zero = weights[0].new_zeros(())
        rate = torch.where(skip, zero, zero + rate)  # zero + rate: a tensor on its device, also if it is a number
    if weight_and_update_norms is not None:
        of_weights, of_updates = weight_and_update_norms
        ratios = torch.where((of_weights > 0) & (of_updates > 0), of_weights / of_updates, 1.0)
        rate = one_for_each((ratios * rate).to(weights[0].dtype), updates)
    torch._foreach_mul_(updates, rate)
    torch._foreach_sub_(weights, updates)


def _add_decay(targets: list[Tensor], weights: list[Tensor], decay: Tensor | float) -> None:
    if isinstance(decay, Tensor):
        torch._foreach_add_(targets, torch._foreach_mul(weights, one_for_each(decay, weights)))
    elif decay != 0:
        torch._foreach_add_(targets, weights, alpha=decay)


def _adam_updates(
    group: Group, grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], skip: Tensor | None
) -> list[Tensor]:
    """Advance the moments. Returns Adam's updates without ``lr`` as new tensors, 0 where ``skip`` is true."""
    beta1, beta2 = group["betas"]
    # The kernel only computes averages, with weight 1 - beta1 for the gradient. Without grad_averaging, exp_avg is such
    # an average divided by 1 - beta1, so it is rescaled around the call.
    unit = 1.0 if group["grad_averaging"] else 1 - beta1
    spread = unit if skip is None else torch.where(skip, exp_avgs[0].new_ones(()), unit)
    if unit != 1.0:
        torch._foreach_mul_(exp_avgs, spread)
    updates = [torch.zeros_like(grad) for grad in grads]
    torch._fused_adam_(
        updates,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step_for_kernel(group, grads[0].device)] * len(grads),
        lr=-1.0,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        found_inf=None if skip is None else skip.float(),
    )
    if unit != 1.0:
        torch._foreach_div_(exp_avgs, spread)
        torch._foreach_div_(updates, unit)
    return updates


def _on(value: Tensor | float, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move a tensor to ``device`` and ``dtype``; a number stays a number."""
    return value.to(device, dtype) if isinstance(value, Tensor) else value
