"""Apex's ``multi_tensor_apply``: ``multi_tensor_applier``, which calls the operations of ``amp_C``."""

from __future__ import annotations

from harness.apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

multi_tensor_applier = MultiTensorApply(2048 * 32)

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
