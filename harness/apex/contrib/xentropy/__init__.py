"""Apex's ``contrib.xentropy``: cross-entropy with label smoothing and padding, on torch's own kernels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from harness.apex.dtypes import wide

__all__ = ["SoftmaxCrossEntropyLoss"]


class SoftmaxCrossEntropyLoss:
    """``SoftmaxCrossEntropyLoss.apply(logits, labels, ...)``, as Apex's autograd Function."""

    @staticmethod
    def apply(
        logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
    ) -> Tensor:
        """Return the loss of each row: ``logits`` of shape ``(N, C)`` and ``labels`` of shape ``(N,)`` give shape
        ``(N,)``.

        It is 0 where the label is ``padding_idx``. ``smoothing`` spreads that share of the target over all classes.
        Computed in float32 or wider; the result has the dtype of the logits, or float32 with ``half_to_float``.
        """
        floats = logits.to(wide(logits))
        # padding_idx may be no class, such as -1
        losses = F.cross_entropy(floats, labels, ignore_index=padding_idx, reduction="none", label_smoothing=smoothing)
        return losses if half_to_float else losses.to(logits.dtype)
