"""Layer norm and RMS norm with Apex's rules about dtypes, on torch's own kernels (contract 5.6).

What differs from ``nn.LayerNorm`` is the dtype of the result, wherever input and parameters differ: that of the *input*
for the plain forms, that of the *parameters* for the Mixed ones. Either way mean and variance are taken in float32 or
wider. The rule holds under O1, O4 and ``torch.autocast`` too, where torch's kernels compute in float32.

``memory_efficient`` is accepted and changes nothing: Apex then recomputed the normalised input in backward; torch's
kernels keep the input and two numbers a row in any case, and the result is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = int | Sequence[int] | torch.Size


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Layer norm of ``input`` over its last dimensions ``normalized_shape``; the result has the input's dtype."""
    return _layer_norm(input, None, None, normalized_shape, eps, input.dtype)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm with scale and shift, both of shape ``normalized_shape``; the result has the input's dtype."""
    return _layer_norm(input, weight, bias, normalized_shape, eps, input.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm with scale and shift; the result has the dtype of ``weight``."""
    return _layer_norm(input, weight, bias, normalized_shape, eps, weight.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """RMS norm of ``input`` over its last dimensions ``normalized_shape``; the result has the input's dtype."""
    return _rms_norm(input, None, normalized_shape, eps, input.dtype)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm with a scale of shape ``normalized_shape``; the result has the input's dtype."""
    return _rms_norm(input, weight, normalized_shape, eps, input.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm with a scale; the result has the dtype of ``weight``."""
    return _rms_norm(input, weight, normalized_shape, eps, weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm in the dtype of ``weight``, or of the input where there is none (Apex's was then always float32)."""
    return _rms_norm(input, weight, normalized_shape, eps, input.dtype if weight is None else weight.dtype)


class FusedLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` whose result always has the input's dtype; parameters ``weight`` and ``bias``.

    ``normalized_shape``: the last dimensions, an int or several. ``eps`` is added to the variance.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_size(normalized_shape), eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        """``(..., *normalized_shape)`` to the same shape."""
        return _layer_norm(input, self.weight, self.bias, self.normalized_shape, self.eps, input.dtype)


class FusedRMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` whose result always has the input's dtype, with an ``eps`` of 1e-5 unless given; ``weight`` only.

    ``normalized_shape``: the last dimensions, an int or several. ``eps`` is added to the mean square.
    """

    eps: float

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_size(normalized_shape), eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        """``(..., *normalized_shape)`` to the same shape."""
        return _rms_norm(input, self.weight, self.normalized_shape, self.eps, input.dtype)


class MixedFusedLayerNorm(FusedLayerNorm):
    """Layer norm whose result has the dtype of its parameters, which it therefore always has."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **others: Any
    ) -> None:
        _refuse_without_affine(self, others)
        super().__init__(normalized_shape, eps=eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """``(..., *normalized_shape)`` to the same shape."""
        return _layer_norm(input, self.weight, self.bias, self.normalized_shape, self.eps, self.weight.dtype)


class MixedFusedRMSNorm(FusedRMSNorm):
    """RMS norm whose result has the dtype of its ``weight``, which it therefore always has."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **others: Any
    ) -> None:
        _refuse_without_affine(self, others)
        super().__init__(normalized_shape, eps=eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """``(..., *normalized_shape)`` to the same shape."""
        return _rms_norm(input, self.weight, self.normalized_shape, self.eps, self.weight.dtype)


def _refuse_without_affine(layer: nn.Module, others: dict[str, Any]) -> None:
    name = type(layer).__name__
    if not others.pop("elementwise_affine", True):
        raise RuntimeError(
            f"{name}(elementwise_affine=False): its result has the dtype of its parameters, so it must have some. "
            f"Use {name.removeprefix('Mixed')}."
        )
    if others:
        raise TypeError(f"{name}: unknown argument {next(iter(others))!r}.")


def _size(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)


def _layer_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Shape, eps: float, dtype: torch.dtype
) -> Tensor:
    input, weight, bias = _alike(input, weight, bias)
    return F.layer_norm(input, _size(shape), weight, bias, eps).to(dtype)


def _rms_norm(input: Tensor, weight: Tensor | None, shape: Shape, eps: float, dtype: torch.dtype) -> Tensor:
    input, weight = _alike(input, weight)
    return F.rms_norm(input, _size(shape), weight, eps).to(dtype)


def _alike(input: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """All in the widest of their dtypes: not every device's kernel takes a mixture. No copies where they agree."""
    dtype = input.dtype
    for other in others:
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in (input, *others))
