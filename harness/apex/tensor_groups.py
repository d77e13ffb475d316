"""Sorting of tensors into lists that one fused kernel or one flat buffer can take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def by_device_and_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """``tensors`` in lists of one device and dtype each, in the order in which the kinds first appear."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
