"""Layer norm and RMS norm with Apex's dtype rules, on torch's own kernels (contract 5.6).

They differ from ``nn.LayerNorm`` in the dtype of the result if input and parameters differ: the plain forms return the
*input's* dtype, the Mixed forms the *parameters'*. Mean and variance are computed in float32 or wider. The rule also
holds under O1, O4 and ``torch.autocast``, where torch's kernels compute in float32.

``memory_efficient`` is accepted and has no effect: Apex then recomputed the normalized input in backward, but torch's
kernels only keep the input and two numbers per row anyway.
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
    """Apply layer norm over its last dimensions ``normalized_shape``; the result has the input's dtype."""
    return _layer_norm(input, None, None, normalized_shape, eps, input.dtype)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Apply layer norm with scale and shift, both of shape ``normalized_shape``; the result has the input's dtype."""
    return _layer_norm(input, weight, bias, normalized_shape, eps, input.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Apply layer norm with scale and shift; the result has the dtype of ``weight``."""
    return _layer_norm(input, weight, bias, normalized_shape, eps, weight.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """Apply RMS norm over its last dimensions ``normalized_shape``; the result has the input's dtype."""
    return _rms_norm(input, None, normalized_shape, eps, input.dtype)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Apply RMS norm with a scale of shape ``normalized_shape``; the result has the input's dtype."""
    return _rms_norm(input, weight, normalized_shape, eps, input.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Apply RMS norm with a scale; the result has the dtype of ``weight``."""
    return _rms_norm(input, weight, normalized_shape, eps, weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """Apply RMS norm in the dtype of ``weight``, or of the input without one (Apex then always returned float32)."""
    return _rms_norm(input, weight, normalized_shape, eps, input.dtype if weight is None else weight.dtype)


class _Function:
    """The functions above under the names of Apex's autograd Functions, which libraries call with ``apply``."""

    def __init__(self, function: Any) -> None:
        self.apply = function


FusedLayerNormFunction = _Function(fused_layer_norm)
FusedLayerNormAffineFunction = _Function(fused_layer_norm_affine)
FusedLayerNormAffineMixedDtypesFunction = _Function(mixed_dtype_fused_layer_norm_affine)
FusedRMSNormFunction = _Function(fused_rms_norm)
FusedRMSNormAffineFunction = _Function(fused_rms_norm_affine)
FusedRMSNormAffineMixedDtypesFunction = _Function(mixed_dtype_fused_rms_norm_affine)


class _InputDtype:
    """The constructor of the plain norms, whose result has the input's dtype."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_size(normalized_shape), eps=eps, elementwise_affine=elementwise_affine)  # type: ignore[call-arg]
        self.memory_efficient = memory_efficient

    def _result_dtype(self, input: Tensor) -> torch.dtype:
        return input.dtype


class _ParameterDtype(_InputDtype):
    """The constructor of the Mixed norms, whose result has the dtype of ``weight``; so they always have parameters."""

    weight: nn.Parameter

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        if not elementwise_affine:
            name = type(self).__name__
            raise RuntimeError(
                f"{name}(elementwise_affine=False) is impossible: its result has the dtype of its parameters. "
                f"Use {name.removeprefix('Mixed')}."
            )
        super().__init__(normalized_shape, eps=eps, memory_efficient=memory_efficient)

    def _result_dtype(self, input: Tensor) -> torch.dtype:
        return self.weight.dtype


class FusedLayerNorm(_InputDtype, nn.LayerNorm):
    """``nn.LayerNorm`` whose result has the input's dtype; parameters ``weight`` and ``bias``.

    ``normalized_shape``: the last dimensions, an int or several. ``eps`` is added to the variance.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a tensor of shape ``(..., *normalized_shape)``."""
        return _layer_norm(input, self.weight, self.bias, self.normalized_shape, self.eps, self._result_dtype(input))


class FusedRMSNorm(_InputDtype, nn.RMSNorm):
    """``nn.RMSNorm`` whose result has the input's dtype, with a default ``eps`` of 1e-5; parameter ``weight``.

    ``normalized_shape``: the last dimensions, an int or several. ``eps`` is added to the mean square.
    """

    eps: float

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a tensor of shape ``(..., *normalized_shape)``."""
        return _rms_norm(input, self.weight, self.normalized_shape, self.eps, self._result_dtype(input))


class MixedFusedLayerNorm(_ParameterDtype, FusedLayerNorm):
    """Layer norm whose result has the dtype of its parameters."""


class MixedFusedRMSNorm(_ParameterDtype, FusedRMSNorm):
    """RMS norm whose result has the dtype of its ``weight``."""


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
    """Cast all to the widest of their dtypes, because not every device's kernel accepts mixed dtypes."""
    dtype = input.dtype
    for other in others:
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in (input, *others))
