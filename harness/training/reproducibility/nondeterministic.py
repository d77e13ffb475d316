"""The operations that raise an error on CUDA under torch.use_deterministic_algorithms(True), as torch 2.14 lists them.

tests/training/test_determinism.py compares them with the documentation of the installed torch, if that is not older:
https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Operation(NamedTuple):
    """An operation of torch's list: its ATen names, and what to use instead."""

    aten: str
    instead: str = ""
    when: Callable[[dict[str, Any]], bool] = lambda arguments: True
    """The calls that it is about."""


_MEAN = "x.mean({}) for one value per channel"
_NEAREST = "interpolate(mode='nearest')"
OPERATIONS = {
    "AvgPool3d": Operation("avg_pool3d_backward"),
    "AdaptiveAvgPool2d": Operation("_adaptive_avg_pool2d_backward", _MEAN.format("(-2, -1)") + ", else avg_pool2d"),
    "AdaptiveAvgPool3d": Operation("_adaptive_avg_pool3d_backward", _MEAN.format("(-3, -2, -1)")),
    "AdaptiveMaxPool2d": Operation(
        "adaptive_max_pool2d_backward", "x.amax((-2, -1)) for one value per channel, else max_pool2d"
    ),
    "FractionalMaxPool2d": Operation("fractional_max_pool2d_backward", "max_pool2d"),
    "FractionalMaxPool3d": Operation("fractional_max_pool3d_backward", "max_pool3d"),
    "MaxUnpool1d": Operation("max_unpool2d"),  # which it calls
    "MaxUnpool2d": Operation("max_unpool2d", f"{_NEAREST}, or a transposed convolution"),
    "MaxUnpool3d": Operation("max_unpool3d", f"{_NEAREST}, or a transposed convolution"),
    "interpolate": Operation(
        "upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward "
        "upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward", _NEAREST,
    ),
    "ReflectionPad1d": Operation("reflection_pad1d_backward", "padding with zeros"),
    "ReflectionPad2d": Operation("reflection_pad2d_backward", "padding with zeros"),
    "ReflectionPad3d": Operation("reflection_pad3d_backward", "padding with zeros"),
    "NLLLoss": Operation(
        "nll_loss2d_forward", "cross_entropy on logits of shape (rows, classes): move the classes last and flatten"
    ),
    "CTCLoss": Operation("_ctc_loss_backward"),
    "EmbeddingBag": Operation(
        "_embedding_bag _embedding_bag_forward_only", "mode='mean' or 'sum'", lambda given: given.get("mode") == 2
    ),
    "put_": Operation("put_ put", "index_put_"),
    "histc": Operation("histc", "bincount of integers"),
    "bincount": Operation("bincount", "index_add", lambda given: given.get("weights") is not None),
    "median": Operation("median.dim median.dim_values nanmedian.dim", "sort, then take the middle value"),
    "grid_sample": Operation("grid_sampler_2d_backward grid_sampler_3d_backward"),
    "scatter_reduce": Operation(
        "scatter_reduce.two scatter_reduce_.two", "reduce='sum' or 'mean'",
        lambda given: given.get("reduce") not in ("sum", "mean"),
    ),
}  # fmt: skip
