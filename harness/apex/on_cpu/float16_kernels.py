"""Matrix products and convolutions of float16 tensors, computed in float32 and rounded once, as on a GPU.

torch's own CPU kernels for them are 15 to 30 times as slow as its float32 kernels, unless the processor has float16
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.apex.amp.cast_kernels import implement

_OPERATIONS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")


def register() -> torch.library.Library:
    """Replace the kernels in this process; ``_destroy()`` restores them."""
    library = torch.library.Library("aten", "IMPL")
    for name in _OPERATIONS:
        op = getattr(torch.ops.aten, name).default
        implement(library, op, _kernel(op, torch.library.get_kernel(op, "CPU")), "CPU", with_keyset=True)
    return library


def _kernel(op: Any, original: Any) -> Callable[..., Any]:
    half = torch.float16

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype is not half:
            return original.call_boxed(keys, *args, **kwargs)
        wide = [a.float() if isinstance(a, Tensor) and a.dtype is half else a for a in args]
        result = original.call_boxed(keys, *wide, **kwargs)
        if isinstance(result, Tensor):
            return result.half()
        return tuple(r.half() if isinstance(r, Tensor) else r for r in result)

    return kernel
