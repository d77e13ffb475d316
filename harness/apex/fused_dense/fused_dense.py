"""A linear layer, and two with a GELU between them (contract 5.6), on ``F.linear`` and ``F.gelu``.

O1 and autocast cast them like any linear layer. Weights have shape (out, in), as in ``nn.Linear``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fused_dense_function(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``input @ weight.T + bias``, from (..., in) to (..., out)."""
    return F.linear(input, weight, bias)


def dense_no_bias_function(input: Tensor, weight: Tensor) -> Tensor:
    """Return ``input @ weight.T``, from (..., in) to (..., out)."""
    return F.linear(input, weight)


def fused_dense_gelu_dense_function(
    input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> Tensor:
    """Apply a linear layer, exact GELU and another linear layer, from (..., in) to (..., out)."""
    return F.linear(F.gelu(F.linear(input, weight1, bias1)), weight2, bias2)


class FusedDense(nn.Linear):
    """``nn.Linear`` under Apex's name. Apex left ``weight`` and ``bias`` uninitialized."""


class FusedDenseGeluDense(nn.Module):
    """A linear layer, exact GELU, and another linear layer.

    The parameters ``weight1``, ``bias1``, ``weight2`` and ``bias2`` are initialized like those of ``nn.Linear``; Apex
    left them uninitialized. Biases are mandatory.
    """

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        if not bias:
            raise ValueError(
                "FusedDenseGeluDense(bias=False) does not exist; use nn.Sequential(nn.Linear(..., bias=False), "
                "nn.GELU(), nn.Linear(..., bias=False))."
            )
        self.in_features, self.intermediate_features = in_features, intermediate_features
        self.out_features = out_features
        self.weight1 = nn.Parameter(torch.empty(intermediate_features, in_features))
        self.bias1 = nn.Parameter(torch.empty(intermediate_features))
        self.weight2 = nn.Parameter(torch.empty(out_features, intermediate_features))
        self.bias2 = nn.Parameter(torch.empty(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize all parameters like those of ``nn.Linear``."""
        init_linear(self.weight1, self.bias1)
        init_linear(self.weight2, self.bias2)

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., in_features) to (..., out_features)."""
        return fused_dense_gelu_dense_function(input, self.weight1, self.bias1, self.weight2, self.bias2)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.intermediate_features}, {self.out_features}"


def init_linear(weight: Tensor, bias: Tensor | None) -> None:
    """Fill a weight of shape (out, in) and its bias like ``nn.Linear``: uniform in ±1/sqrt(in)."""
    bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] else 0.0
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound)
