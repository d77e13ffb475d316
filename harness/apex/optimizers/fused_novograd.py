"""``FusedNovoGrad``: NovoGrad with Apex's arguments and state, on torch's foreach kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from harness.apex.dtypes import REDUCED
from harness.apex.optimizers.batch import Group, ParameterBatch
from harness.apex.optimizers.fused_optimizer import FusedOptimizer
from harness.apex.tensor_groups import norms, one_for_each


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad: Adam with one second moment per tensor, that of the gradient's norm.

    Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep Networks,
    https://arxiv.org/abs/1905.11286.

    With ``norm_type=2`` the running norm is ``sqrt(beta2 * v**2 + (1 - beta2) * |g|**2)``; with 0 (largest absolute
    value) it is ``beta2 * v + (1 - beta2) * |g|``. It starts at the first norm, or at 0 with ``init_zero=True``.
    ``reg_inside_moment=True`` accumulates normalized gradients plus weight decay, as the paper does. The default
    accumulates raw gradients, and normalizes and decays in the update. ``grad_averaging=False`` adds gradients to
    ``exp_avg`` with weight 1 instead of ``1 - beta1``.

    As in Apex, ``group["exp_avg_sq"]`` holds the running norms (not squared): a list of two vectors, for the group's
    float16 or bfloat16 parameters and for the others, over the parameters that have had a gradient, in order.
    ``exp_avg`` is float32 for float16 and bfloat16 parameters; ``step`` is counted per group.
    """

    settings = ("set_grad_none", "reg_inside_moment")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type not in (0, 2):
            raise RuntimeError(
                f"FusedNovoGrad was given norm_type={norm_type!r}; it must be 2 (Euclidean) or 0 (largest absolute "
                "value)."
            )
        self.reg_inside_moment = reg_inside_moment
        defaults = dict(
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_averaging=grad_averaging,
            norm_type=norm_type,
            init_zero=init_zero,
        )
        super().__init__(params, defaults, set_grad_none, amsgrad)

    def _update(self) -> None:
        for group in self._counted_groups():
            running = self._running_norms(group)
            for batch in self._batches(group):
                norms_now = self._advance_norms(group, batch, running)
                exp_avgs = self._moments(batch, "exp_avg")
                novograd_update(group, batch.weights, batch.grads, exp_avgs, norms_now, self.reg_inside_moment)
                self._write_back(batch)
            self._store_norms(group, running)

    def _advance_norms(self, group: Group, batch: ParameterBatch, running: dict[Tensor, Tensor]) -> Tensor:
        """Advance the running norms of ``batch`` and return them, one per parameter."""
        new = norms(batch.grads, 2 if group["norm_type"] == 2 else math.inf)
        first = new.new_zeros(()) if group["init_zero"] else None
        old = [
            running.get(param, one if first is None else first)
            for param, one in zip(batch.params, new.unbind(), strict=True)
        ]
        now = next_norms(group, torch.stack(old), new)
        running.update(zip(batch.params, now.unbind(), strict=True))
        return now

    def _members(self, group: Group) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters that have had a gradient: those in reduced precision, and the others."""
        known = [param for param in group["params"] if "exp_avg" in self.state.get(param, {})]
        return [p for p in known if p.dtype in REDUCED], [p for p in known if p.dtype not in REDUCED]

    def _running_norms(self, group: Group) -> dict[Tensor, Tensor]:
        """Return ``group["exp_avg_sq"]`` by parameter."""
        reduced, others = self._members(group)
        stored = group.get("exp_avg_sq", [])
        sizes, wanted = [vector.numel() for vector in stored], [len(reduced), len(others)]
        members = reduced + others
        if sizes != wanted and 0 in sizes and sum(sizes) == len(members):
            # Saved when all parameters had one kind of dtype, as without amp.initialize: they are in plain order
            known = {id(param) for param in members}
            members = [param for param in group["params"] if id(param) in known]
        elif sizes != wanted and (sizes or members):
            raise ValueError(
                f'group["exp_avg_sq"] holds {sizes} running norms, but {wanted} parameters have state (float16 or '
                "bfloat16 first, then other dtypes). Load the state dict into an optimizer over the same parameters, "
                "in the same dtypes."
            )
        values = [value for vector in stored for value in vector.unbind()]
        return {param: value.to(param.device) for param, value in zip(members, values, strict=True)}

    def _store_norms(self, group: Group, running: dict[Tensor, Tensor]) -> None:
        """Put ``running`` into ``group["exp_avg_sq"]``."""
        device = group["params"][0].device
        group["exp_avg_sq"] = [
            torch.stack([running[param].to(device) for param in members]) if members else torch.zeros(0, device=device)
            for members in self._members(group)
        ]

    def _adopt_loaded(self, group: Group) -> None:
        super()._adopt_loaded(group)
        if "exp_avg_sq" in group:
            self._store_norms(group, self._running_norms(group))


def next_norms(group: Group, old: Tensor, new: Tensor) -> Tensor:
    """Return the running norms after a step, from the ``old`` ones and the ``new`` norms of the gradients."""
    beta2 = group["betas"][1]
    if group["norm_type"] == 2:
        return (beta2 * old**2 + (1 - beta2) * new**2).sqrt()
    return beta2 * old + (1 - beta2) * new


def novograd_update(
    group: Group,
    weights: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    running_norms: Tensor,
    reg_inside_moment: bool,
) -> None:
    """Update weights and moments in place, for tensors as in a ``ParameterBatch`` and the norms after this step."""
    beta1, beta2 = group["betas"]
    grad_weight = 1 - beta1 if group["grad_averaging"] else 1.0
    weight_decay = group["weight_decay"]
    step_size = lr = float(group["lr"])
    correction = 1.0
    if group["bias_correction"]:
        step_size = lr / (1 - beta1 ** group["step"])
        correction = math.sqrt(1 - beta2 ** group["step"])
    denominators = running_norms / correction + group["eps"]
    torch._foreach_mul_(exp_avgs, beta1)
    if reg_inside_moment:
        normalized = torch._foreach_div(grads, one_for_each(denominators, grads))
        if weight_decay != 0:
            torch._foreach_add_(normalized, weights, alpha=weight_decay)
        torch._foreach_add_(exp_avgs, normalized, alpha=grad_weight)
        torch._foreach_add_(weights, exp_avgs, alpha=-step_size)
        return
    torch._foreach_add_(exp_avgs, grads, alpha=grad_weight)
    if weight_decay != 0:
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
    torch._foreach_addcmul_(weights, exp_avgs, one_for_each(step_size / denominators, weights), value=-1)
