"""Reduced dtypes, the dtype to compute in, and the value of a master whose weight has changed."""

from __future__ import annotations

import torch
from torch import Tensor

REDUCED = (torch.float16, torch.bfloat16)


def wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which to compute with ``tensor``: float32 for float16 and bfloat16, else its own."""
    return torch.promote_types(tensor.dtype, torch.float32)


@torch.no_grad()
def follow(master: Tensor, weight: Tensor, candidate: Tensor | None = None) -> None:
    """Give ``master`` the value of ``weight``, which other code may have written to.

    Elements of ``candidate``, by default the master itself, that round to the weight's are kept, with their extra bits.
    """
    candidate = master if candidate is None else candidate
    master.copy_(torch.where(candidate.to(weight.dtype) == weight, candidate, weight.float()))
