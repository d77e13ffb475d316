"""Matrix products and convolutions of float16 and bfloat16 tensors, computed in float32 and rounded once, as on a GPU.

torch's own CPU kernels for them are 3 to 60 times as slow as its float32 kernels, unless the processor has arithmetic
for the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from harness.apex.amp.cast_kernels import implement

_OPERATIONS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")


def slow_dtypes() -> set[torch.dtype]:
    """Return the dtypes for which this process needs ``register``. Some of torch's float16 kernels are slow on any
    CPU."""
    return {torch.float16} if has_bfloat16() else {torch.float16, torch.bfloat16}


def has_bfloat16() -> bool:
    """Return True if this CPU multiplies bfloat16 numbers, and torch and oneDNN may use that: since 2020 on Intel's and
    since 2022 on AMD's servers."""
    if not torch.backends.mkldnn.is_available():  # a torch without oneDNN, which lacks the question below, too
        return False
    cpu, supported = torch.cpu, bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return supported and (  # which is true for any AVX-512
        not cpu._is_avx2_supported() or cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported()
    )


def register(dtypes: Collection[torch.dtype]) -> torch.library.Library:
    """Replace the kernels for ``dtypes`` in this process; ``_destroy()`` restores them."""
    library = torch.library.Library("aten", "IMPL")
    for name in _OPERATIONS:
        op = getattr(torch.ops.aten, name).default
        implement(library, op, _kernel(op, torch.library.get_kernel(op, "CPU"), dtypes), "CPU", with_keyset=True)
    return library


def _kernel(op: Any, original: Any, dtypes: Collection[torch.dtype]) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        half = args[0].dtype
        others = (a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point())
        if half not in dtypes or any(dtype is not half for dtype in others):  # torch refuses most mixtures of dtypes
            return original.call_boxed(keys, *args, **kwargs)
        wide = [a.float() if isinstance(a, Tensor) and a.dtype is half else a for a in args]
        result = original.call_boxed(keys, *wide, **kwargs)
        if isinstance(result, Tensor):
            return result.to(half)
        return tuple(r.to(half) if isinstance(r, Tensor) else r for r in result)

    return kernel
