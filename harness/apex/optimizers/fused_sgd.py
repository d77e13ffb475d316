"""``FusedSGD``: stochastic gradient descent with momentum, with Apex's arguments, on torch's fused kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from harness.apex.optimizers.fused import Batch, FusedOptimizer, check_options


class FusedSGD(FusedOptimizer):
    """SGD with momentum as in ``torch.optim.SGD``; the first ``momentum_buffer`` is the gradient itself.

    Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013.

    ``lr`` must be given, here or in every group. ``wd_after_momentum=True`` adds the weight decay to the update rather
    than to the gradient, where momentum would accumulate it. Buffers are float32 for float16 and bfloat16 parameters.
    ``materialize_master_grads`` has no effect: amp always gives masters gradients of their own. For the same reason
    ``most_recent_scale`` and ``scale_set_by_backward`` stay as they are. ``zero_grad()`` zeroes by default.
    """

    settings = (
        *("set_grad_none", "wd_after_momentum", "materialize_master_grads"),
        *("most_recent_scale", "scale_set_by_backward"),
    )

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
        check_options("FusedSGD", momentum=momentum, weight_decay=weight_decay)
        if lr is not required:  # type: ignore[comparison-overlap]
            check_options("FusedSGD", lr=lr)
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

    def _update(self) -> None:
        for group in self.param_groups:
            for batch in self._batches(group):
                weight_decay = group["weight_decay"]
                if self.wd_after_momentum and weight_decay != 0:
                    # w - lr * (d + wd * w) == w * (1 - lr * wd) - lr * d, and d does not depend on w then
                    torch._foreach_mul_(batch.weights, 1 - group["lr"] * weight_decay)
                    weight_decay = 0.0
                self._descend(group, batch, weight_decay)
                self._write_back(batch)

    def _descend(self, group: dict[str, Any], batch: Batch, weight_decay: float) -> None:
        if group["momentum"] == 0:
            self._kernel(group, batch.weights, batch.grads, [], weight_decay, False)
            return
        is_new = [self.state[param].get("momentum_buffer") is None for param in batch.params]
        buffers = self._moments(batch, "momentum_buffer")
        for first in (True, False):
            chosen = [i for i, new in enumerate(is_new) if new is first]
            if chosen:
                weights, grads, momenta = ([some[i] for i in chosen] for some in (batch.weights, batch.grads, buffers))
                self._kernel(group, weights, grads, momenta, weight_decay, first)

    @staticmethod
    def _kernel(
        group: dict[str, Any],
        weights: list[Tensor],
        grads: list[Tensor],
        buffers: list[Tensor],
        weight_decay: float,
        first: bool,
    ) -> None:
        torch._fused_sgd_(
            weights,
            grads,
            buffers,
            weight_decay=weight_decay,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
            is_first_step=first,
        )
