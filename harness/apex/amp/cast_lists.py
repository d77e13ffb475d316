"""Lists of operations by the precision in which O1 and O4 run them, as in Apex (contract 4.1), by ATen name.

These are the *differences* to ``torch.autocast``: ``cast_kernels`` registers only what a device's autocast does not
already do as Apex did. Operations that Apex never had follow autocast's choice for CUDA on every device, so a script
does the same on a CPU as on a GPU. Names cover all overloads except in-place and ``out=`` ones, which keep the dtype of
the tensor they write to. Composite operations (``F.triplet_margin_loss``) follow from their parts, or are listed under
``FLOAT32_FUNCTIONS``.
"""

from __future__ import annotations


def _names(text: str) -> list[str]:
    return text.split()


REDUCED = _names("""
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear
    prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
""")
REDUCED += _names("chain_matmul linalg_multi_dot")  # autocast's choice

FLOAT32 = _names("""
    upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa
    upsample_trilinear3d
    grid_sampler softplus softmax log_softmax gelu layer_norm group_norm cosine_similarity
    poisson_nll_loss cosine_embedding_loss cross_entropy_loss hinge_embedding_loss kl_div l1_loss mse_loss
    margin_ranking_loss multilabel_margin_loss multi_margin_loss nll_loss nll_loss2d nll_loss_nd
    binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss
    acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum
    dist norm linalg_vector_norm linalg_matrix_norm prod std sum var renorm
""")
FLOAT32 += _names("log1p logsumexp pdist rms_norm nuclear_norm frobenius_norm")  # autocast's choice
FLOAT32 += _names("matrix_exp linalg_matrix_exp")  # in float16 their parts, once cast, would mix dtypes

# Everything else on Apex's promotion list (add, mul, eq, ...) is promoted by torch itself.
WIDEST = _names("addcdiv addcmul atan2 cross linalg_cross bilinear dot")
WIDEST += _names("index_put scatter_add tensordot vdot")  # autocast's choice

# torch promotes these by itself; autocast's own rule raises on the reduced dtype that is not the active one.
UNTOUCHED = _names("cat stack")

# An error on reduced-precision input, because its gradient overflows there; float32 input is fine.
BANNED = ["binary_cross_entropy"]

# In-place methods of float32 operations: the result cannot be written into a float16 tensor.
BANNED_IN_PLACE = _names("""
    acos_ asin_ cosh_ erfinv_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_ pow_ cumprod_ cumsum_ renorm_
""")

# Functions of torch.nn.functional on Apex's float32 list, made of parts of which some would run in float16: squares
# would overflow (local_response_norm), or gradients be rounded on each of two paths.
FLOAT32_FUNCTIONS = _names("local_response_norm normalize multilabel_soft_margin_loss")

# Operations whose built-in autocast rule differs from Apex's and is replaced.
REPLACED = {"grid_sampler", "binary_cross_entropy", "cat", "stack"}
