"""``FusedAdagrad``: Adagrad with L2 or decoupled weight decay, with Apex's arguments, on torch's foreach kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.apex.optimizers.batch import Group, ParameterBatch
from harness.apex.optimizers.fused_optimizer import FusedOptimizer


class FusedAdagrad(FusedOptimizer):
    """Adagrad. Duchi, Hazan and Singer, Adaptive Subgradient Methods, JMLR 12 (2011).

    ``sum``, the accumulated squares of gradients, starts at 0 and is float32 for float16 and bfloat16 parameters.
    ``adagrad_w_mode=True`` decouples the weight decay from the gradient, as AdamW does.
    """

    settings = ("set_grad_none", "adagrad_w_mode")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = adagrad_w_mode
        super().__init__(params, dict(lr=lr, eps=eps, weight_decay=weight_decay), set_grad_none)

    def _update_batch(self, group: Group, batch: ParameterBatch) -> None:
        adagrad_update(group, batch.weights, batch.grads, self._moments(batch, "sum"), self.adagrad_w_mode)


def adagrad_update(
    group: Group, weights: list[Tensor], grads: list[Tensor], sums: list[Tensor], adagrad_w_mode: bool
) -> None:
    """Update weights and sums in place, for tensors as in a ``ParameterBatch``."""
    lr, weight_decay = float(group["lr"]), group["weight_decay"]
    if weight_decay != 0 and not adagrad_w_mode:
        grads = list(torch._foreach_add(grads, weights, alpha=weight_decay))
    torch._foreach_addcmul_(sums, grads, grads)
    roots = torch._foreach_sqrt(sums)
    torch._foreach_add_(roots, group["eps"])
    if weight_decay != 0 and adagrad_w_mode:
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
    torch._foreach_addcdiv_(weights, grads, roots, value=-lr)
