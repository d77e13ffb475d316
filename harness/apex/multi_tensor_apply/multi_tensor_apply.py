"""``MultiTensorApply`` calls operations on lists of tensors for Apex-era code. The operations are in ``amp_C``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class MultiTensorApply:
    """``applier(op, noop_flag, tensor_lists, *args)`` calls ``op(chunk_size, noop_flag, tensor_lists, *args)``.

    ``chunk_size`` (elements) is only passed on, because operations take it first; torch's kernels choose their own.
    """

    available = True  # scripts read it as "the extensions are built" and avoid them otherwise
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing. Apex raised an error here if its extensions were not built."""

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
