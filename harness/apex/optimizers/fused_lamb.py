"""``FusedLAMB``, and ``apply_lamb``: the LAMB update that it shares with ``FusedMixedPrecisionLamb``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.apex.amp_C import l2_norms
from harness.apex.optimizers.fused import FusedOptimizer, check_options, count_for_kernel, refuse_amsgrad


class FusedLAMB(FusedOptimizer):
    """LAMB: Adam whose step for each tensor is scaled to the norm of that tensor.

    You et al., Large Batch Optimization for Deep Learning, https://arxiv.org/abs/1904.00962.

    All gradients are first divided by ``max(1, global norm / max_grad_norm)``; the norm is over all groups, and the
    constructor's ``max_grad_norm`` counts (None or 0: no clipping). The trust ratio ``|w| / |update|`` applies where
    ``weight_decay`` is not 0, or everywhere with ``use_nvlamb=True``. ``adam_w_mode=False`` adds the weight decay to
    the gradient; ``grad_averaging=False`` adds gradients to ``exp_avg`` with weight 1 instead of ``1 - beta1``.

    Moments are float32 for float16 and bfloat16 parameters; ``step`` is counted per group. Unlike Apex's, which left
    the update in ``p.grad``, this one does not touch the gradients.
    """

    settings = ("set_grad_none", "adam_w_mode", "use_nvlamb")

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
        refuse_amsgrad("FusedLAMB", amsgrad)
        check_options("FusedLAMB", betas, lr=lr, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm or 0.0)
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
        super().__init__(params, defaults, set_grad_none)

    def _update(self) -> None:
        factor = clip_factor(self)
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
                apply_lamb(self, group, factor, None)


def clip_factor(optimizer: FusedOptimizer, inv_scale: Tensor | float = 1.0) -> Tensor | float:
    """What to multiply each gradient by: ``inv_scale``, and what clips the global norm to ``max_grad_norm``."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    max_norm = optimizer.defaults["max_grad_norm"]
    if not max_norm or not grads or any(grad.layout is not torch.strided for grad in grads):  # sparse: refused later
        return inv_scale
    norm = torch.linalg.vector_norm(l2_norms(grads, grads[0].device)) * _on(inv_scale, grads[0].device)
    return (max_norm / norm).clamp(max=1.0) * _on(inv_scale, grads[0].device)


def apply_lamb(
    optimizer: FusedOptimizer, group: dict[str, Any], factor: Tensor | float, found_inf: Tensor | None
) -> None:
    """Update ``group`` from its gradients times ``factor``; with ``found_inf`` not 0 nothing changes.

    ``optimizer`` has ``adam_w_mode`` and ``use_nvlamb``; ``group["step"]`` counts this step already.
    """
    weight_decay = group["weight_decay"]
    for batch in optimizer._batches(group):
        grads: Any = torch._foreach_mul(batch.grads, _on(factor, batch.device, batch.dtype))
        if weight_decay != 0 and not optimizer.adam_w_mode:  # type: ignore[attr-defined]
            torch._foreach_add_(grads, batch.weights, alpha=weight_decay)
        moments = optimizer._moments(batch, "exp_avg"), optimizer._moments(batch, "exp_avg_sq")
        skip = None if found_inf is None else (found_inf != 0).to(batch.device)
        updates = _adam_updates(group, grads, *moments, skip)
        del grads
        lr = _on(group["lr"], batch.device, batch.dtype)
        if skip is not None:
            lr = torch.where(skip, 0.0, lr)
        if weight_decay != 0 and optimizer.adam_w_mode:  # type: ignore[attr-defined]
            torch._foreach_add_(updates, batch.weights, alpha=weight_decay)
        if weight_decay != 0 or optimizer.use_nvlamb:  # type: ignore[attr-defined]
            torch._foreach_mul_(updates, list((_trust_ratios(batch.weights, updates) * lr).unbind()))
        else:
            torch._foreach_mul_(updates, lr)
        torch._foreach_sub_(batch.weights, updates)
        optimizer._write_back(batch)


def _adam_updates(
    group: dict[str, Any], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], skip: Tensor | None
) -> list[Tensor]:
    """Advance the moments; returns Adam's updates without ``lr`` as new tensors, 0 where ``skip`` is true."""
    beta1, beta2 = group["betas"]
    # without averaging exp_avg is an average, which is all that the kernel knows, divided by 1 - beta1
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
        [count_for_kernel(group, grads[0].device)] * len(grads),
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


def _trust_ratios(weights: list[Tensor], updates: list[Tensor]) -> Tensor:
    """``|weight| / |update|`` for each pair, shape ``(len(weights),)``; 1 where one of the norms is 0."""
    weight_norms, update_norms = (torch.stack(torch._foreach_norm(tensors, 2)) for tensors in (weights, updates))
    return torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)


def _on(value: Tensor | float, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """A tensor brought to ``device`` and ``dtype``; a number stays a number."""
    return value.to(device, dtype) if isinstance(value, Tensor) else value
