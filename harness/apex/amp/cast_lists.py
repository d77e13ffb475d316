"""Lists of operations by the precision in which O1 and O4 run them, by ATen name.

``APEX``, for O1, is Apex's (contract 4.1); operations that Apex never had follow ``torch.autocast``'s choice for CUDA.
``AUTOCAST``, for O4, is ``torch.autocast``'s for CUDA. Both hold on every device, so a script does the same on a CPU
as on a GPU. They are *differences* to the device's own autocast: ``cast_kernels`` registers only what it does not do.

Names cover all overloads except in-place and ``out=`` ones, which keep the dtype of the tensor they write to. Composite
operations (``F.triplet_margin_loss``) follow from their parts, or are listed under ``float32_functions``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CastLists:
    """Names of operations. ``reduced`` run in float16 or bfloat16, ``float32`` in float32, ``widest`` in the widest
    dtype of their arguments."""

    reduced: tuple[str, ...]
    float32: tuple[str, ...]
    widest: tuple[str, ...]
    overrides_builtin: tuple[str, ...]
    """Operations for which the built-in autocast of a device has another rule."""
    banned_in_place: tuple[str, ...]
    """In-place methods of float32 operations: the result cannot be written into a float16 tensor."""
    float32_functions: tuple[str, ...]
    """Functions of torch.nn.functional made of parts of which some would run in float16: squares would overflow
    (local_response_norm), or gradients be rounded on each of two paths."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_MATRIX_EXP = _names("matrix_exp linalg_matrix_exp")  # in reduced precision their parts, once cast, would mix dtypes
_MATRIX_NORM = ("linalg_matrix_norm",)  # torch's rule for CUDA fails: it passes a dtype beside the float16 matrix

_REDUCED = _names("""
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear
    prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    chain_matmul linalg_multi_dot einsum convolution _convolution
""")  # the last line is autocast's choice

_FLOAT32 = _names("""
    upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa
    upsample_trilinear3d
    grid_sampler softplus softmax log_softmax gelu layer_norm group_norm cosine_similarity
    poisson_nll_loss cosine_embedding_loss cross_entropy_loss hinge_embedding_loss kl_div l1_loss mse_loss
    margin_ranking_loss multilabel_margin_loss multi_margin_loss nll_loss nll_loss2d nll_loss_nd
    binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss
    acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum
    dist norm linalg_vector_norm prod std sum var renorm
    log1p logsumexp pdist rms_norm nuclear_norm frobenius_norm native_layer_norm
""")  # the last line is autocast's choice

# Everything else on Apex's promotion list (add, mul, eq, ...) is promoted by torch itself.
_WIDEST = _names("""
    addcdiv addcmul atan2 cross linalg_cross bilinear dot
    index_put scatter_add tensordot vdot
""")  # the last line is autocast's choice

# These run in the dtype in which their arguments arrive, though the autocast of some devices casts them. Its rules for
# the first line raise on the reduced dtype that is not the active one.
UNTOUCHED = _names("""
    cat stack index_copy
    adaptive_avg_pool3d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max_pool3d max_unpool2d
    max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
    grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback view_as_complex
""")
# So does this, but outside CUDA it is computed in float32, because there is no kernel, and rounded.
THROUGH_FLOAT32 = ("avg_pool3d",)

# {operation: what to do instead}. An error on reduced-precision input, because its gradient overflows there; float32
# input is fine.
BANNED = {"binary_cross_entropy": "Leave the sigmoid out and use torch.nn.BCEWithLogitsLoss, or pass input.float()."}

_BANNED_IN_PLACE = _names("""
    acos_ asin_ cosh_ erfinv_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_ pow_ cumprod_ cumsum_ renorm_
""")

APEX = CastLists(
    reduced=_REDUCED,
    float32=_FLOAT32 + _MATRIX_EXP + _MATRIX_NORM,
    widest=_WIDEST,
    overrides_builtin=("grid_sampler", *_MATRIX_NORM, *BANNED),
    banned_in_place=_BANNED_IN_PLACE,
    float32_functions=_names("local_response_norm normalize multilabel_soft_margin_loss"),
)

# The lists of torch's aten/src/ATen/autocast_mode.h. An overload that the installed torch does not cast on CUDA is not
# cast elsewhere either, except recurrent layers, which it casts as operations of cuDNN, matrix_exp, matrix norms, and
# the banned operation, whose error is amp's own.
CUDNN_RECURRENT = _names("lstm gru rnn_tanh rnn_relu")
REGISTERED_EVEN_ON_CUDA = (*CUDNN_RECURRENT, *_MATRIX_EXP, *_MATRIX_NORM, *BANNED)
AUTOCAST = CastLists(
    reduced=_names("""
        conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution
        prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
        lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention
    """)
    + CUDNN_RECURRENT,
    float32=_names("""
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus
        layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity
        poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
        huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
        multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp linalg_matrix_sqrth
        upsample_nearest1d upsample_nearest2d upsample_nearest3d
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
        upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
        _upsample_bicubic2d_aa
        prod softmax log_softmax cumprod cumsum linalg_vector_norm sum norm
    """)
    + _MATRIX_EXP
    + _MATRIX_NORM,
    widest=_names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"),
    overrides_builtin=("grid_sampler", *BANNED),
    banned_in_place=(),
    float32_functions=(),
)
