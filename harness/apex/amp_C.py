"""Apex's extension ``amp_C``, whose functions are in ``optimizers.multi_tensor``."""

from __future__ import annotations

from typing import Any

from harness.apex.optimizers import multi_tensor
from harness.apex.optimizers.multi_tensor import *  # noqa: F403

__all__: list[str] = []
__all__ += multi_tensor.__all__


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. It has {', '.join(__all__)}.")
