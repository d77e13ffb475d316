"""Reduced dtypes, and the dtype to compute in."""

from __future__ import annotations

import torch
from torch import Tensor

REDUCED = (torch.float16, torch.bfloat16)


def wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which to compute with ``tensor``: float32 for float16 and bfloat16, else its own."""
    return torch.promote_types(tensor.dtype, torch.float32)
