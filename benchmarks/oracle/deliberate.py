"""The deliberate differences from the original, by cell, with the row of docs/apex_differences.md that explains each.

A cell that is listed must differ, and one that differs must be listed: ``python -m benchmarks.oracle`` checks both.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

FLOOR = "the loss scale has a floor of 1"
CACHE = "O1 casts a weight at each use, so its gradients are summed in float32"
OPERATION = "O1 decides by operation, not by name"
FLOAT64 = "O1 leaves float64 alone"
IN_PLACE = "O1 leaves in-place operations to torch"
BROKEN = "operations and classes that fail, or are not cast, in the original with this version of torch"
RESUME = "fixed bug 1: O2 resumes exactly"
FIRST = "fixed bug 18: delay_unscale before the masters exist"
STATIC = "fixed bug 7: static scale of 1 with masters"
HALF_NORM = "LARC computes the norms of float16 tensors in float32"
WIDE_STATE = "fused optimizers keep float32 state for float16 weights"
NO_BUFFER = "FusedSGD keeps no momentum buffer without momentum"
LAMB_GRADIENTS = "FusedLAMB does not overwrite gradients"
FIRST_NORM = "FusedNovoGrad computes its first norm like the later ones"
HALF_SUM = "O3 adds float16 gradients as the original's Python fallback does, not as its kernel does"
STATISTICS = "SyncBatchNorm computes like the original's CUDA kernels"

# Pattern of names of cells -> reason. The first pattern that fits counts.
PATTERNS: dict[str, str] = {
    "overflow until the floor O[12]": FLOOR,
    "static scale of 1 and accumulation O2": STATIC,
    "delay_unscale without a first zero_grad O2": FIRST,
    "resume O2 * masters=False": RESUME,
    "LARC O3 *": HALF_NORM,
    "LARC around an initialized optimizer O3": HALF_NORM,
    "unscaling kernels O3 accumulate=2": HALF_SUM,
    "fused FusedSGD without momentum O*": NO_BUFFER,
    "fused FusedNovoGrad O[023]": BROKEN,
    "fused FusedSGD O3": WIDE_STATE,
    "fused FusedSGD with nesterov O3": WIDE_STATE,
    "fused FusedAdagrad O3": WIDE_STATE,
    "fused FusedLAMB O3": WIDE_STATE,
    "fused FusedNovoGrad O1": FIRST_NORM,
    "fused* FusedLAMB O*": LAMB_GRADIENTS,
    "create_syncbn_process_group": STATISTICS,
    "SyncBatchNorm O2 *": BROKEN,
    "SyncBatchNorm *": STATISTICS,
    "network O1 RNN *": BROKEN,
    "network O1 *Cell": CACHE,
    "network O1 weight used three times": CACHE,
    "network O1 PReLU": BROKEN,
    "network O1 Bilinear": BROKEN,
    "network O1 torch.softmax": OPERATION,
    "operation prelu": BROKEN,
    "spelling F.prelu": BROKEN,
    "spelling cdist": BROKEN,
    "spelling float64 *": FLOAT64,
    "spelling add in place": IN_PLACE,
    "spelling operator +=": IN_PLACE,
    **dict.fromkeys(
        (
            *("spelling torch.softmax", "spelling Tensor.softmax", "spelling torch.log_softmax"),
            *("spelling torch.einsum *", "spelling scaled_dot_product_attention *", "spelling torch.linalg.norm"),
            *("spelling torch.layer_norm", "spelling F.rms_norm", "spelling logsumexp", "spelling log1p"),
            "spelling huber_loss",
        ),
        OPERATION,
    ),
}


def reason(name: str) -> str:
    """Why the cell ``name`` differs on purpose; empty if it must not."""
    return next((why for pattern, why in PATTERNS.items() if fnmatchcase(name, pattern)), "")
