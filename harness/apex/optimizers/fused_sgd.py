"""``FusedSGD``: stochastic gradient descent with momentum, with Apex's arguments, on torch's fused kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from harness.apex.optimizers.batch import Group, ParameterBatch
from harness.apex.optimizers.fused_optimizer import FusedOptimizer


class FusedSGD(FusedOptimizer):
    """SGD with momentum as in ``torch.optim.SGD``; the first ``momentum_buffer`` is the gradient itself.

    Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013.

    ``lr`` must be given, here or in every group. ``wd_after_momentum=True`` adds the weight decay to the update rather
    than to the gradient, where momentum would accumulate it. Buffers are float32 for float16 and bfloat16 parameters.
    ``materialize_master_grads`` has no effect: amp always gives masters gradients of their own. For the same reason
    ``most_recent_scale`` and ``scale_set_by_backward`` never change. ``zero_grad()`` fills with zeros by default.
    """

    settings = (
        *("set_grad_none", "wd_after_momentum", "materialize_master_grads"),
        *("most_recent_scale", "scale_set_by_backward"),
    )
    state_key_for_device_skip = "momentum_buffer"

    def __init__(
        self,
        params: Any,
        lr: float = required,  # type: ignore[assignment]
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"FusedSGD was given nesterov=True with momentum={momentum} and dampening={dampening}; Nesterov "
                "momentum needs momentum > 0 and dampening=0."
            )
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(params, defaults, set_grad_none)

    def _update_batch(self, group: Group, batch: ParameterBatch) -> None:
        skip = None if self.found_inf is None else self.found_inf != 0
        has_momentum = group["momentum"] != 0
        is_new = [has_momentum and self.state[param].get("momentum_buffer") is None for param in batch.params]
        buffers = self._moments(batch, "momentum_buffer") if has_momentum else []
        for first in (True, False):
            chosen = [i for i, new in enumerate(is_new) if new is first]
            if chosen:
                weights, grads, moments = ([x[i] for i in chosen if x] for x in (batch.weights, batch.grads, buffers))
                sgd_update(group, weights, grads, moments, first, self.wd_after_momentum, skip)


def sgd_update(
    group: Group,
    weights: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    is_first_step: bool,
    wd_after_momentum: bool,
    skip: Tensor | None = None,
) -> None:
    """Update weights and buffers (empty without momentum) in place, for tensors as in a ``ParameterBatch``.

    Where the scalar ``skip`` is true, nothing changes.
    """
    weight_decay = group["weight_decay"]
    if wd_after_momentum and weight_decay != 0:
        # w - lr * (d + wd * w) == w * (1 - lr * wd) - lr * d, where d no longer depends on w
        kept = 1 - group["lr"] * weight_decay
        ones = weights[0].new_ones(())
        torch._foreach_mul_(weights, kept if skip is None else torch.where(skip, ones, ones * kept))
        weight_decay = 0.0
    torch._fused_sgd_(
        weights,
        grads,
        momentum_buffers,
        weight_decay=weight_decay,
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=False,
        is_first_step=is_first_step,
        found_inf=None if skip is None else skip.float(),
    )
