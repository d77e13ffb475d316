"""``adam``, the function of Apex's extension ``fused_adam_cuda``, which copies of the FusedAdam of 2018 call."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["adam"]


@torch.no_grad()
def adam(
    p: Tensor,
    out_p: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Step ``p`` and its moments ``m`` and ``v`` in place on the gradient ``g`` divided by ``grad_scale``.

    ``out_p`` receives a copy of ``p``, unless it is empty. ``mode`` 0 puts ``eps`` inside the square root, 1 outside.
    ``decay`` times ``p`` is added to the update (decoupled weight decay).
    """
    grad = g.to(p.dtype) / grad_scale
    m.lerp_(grad, 1.0 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    denominator = (v + eps).sqrt() if mode == 0 else v.sqrt() + eps
    if bias_correction:
        lr = lr * (1.0 - beta2**step) ** 0.5 / (1.0 - beta1**step)
    p.sub_(m / denominator + decay * p, alpha=lr)
    if out_p.numel():
        out_p.copy_(p)
