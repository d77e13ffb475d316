"""``flatten`` and ``unflatten``, the functions of Apex's extension ``apex_C``."""

from __future__ import annotations

from harness.apex.tensor_groups import flatten, unflatten

__all__ = ["flatten", "unflatten"]
