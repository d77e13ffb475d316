"""Apex's ``contrib.clip_grad``, on torch's own foreach kernels."""

from __future__ import annotations

from torch.nn.utils import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
