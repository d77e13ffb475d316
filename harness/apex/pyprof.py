"""Apex's ``pyprof``, which marked every operation for NVIDIA's profiler. Scripts that start it run; it does nothing."""

from __future__ import annotations

import sys
import warnings
from typing import Any

__all__ = ["init", "nvtx", "wrap"]

nvtx = sys.modules[__name__]  # Apex had the functions in pyprof.nvtx, too


def init(*args: Any, **options: Any) -> None:
    """Do nothing, and warn."""
    warnings.warn("apex.pyprof has no effect in harness.apex. Use torch.profiler.", UserWarning, stacklevel=2)


def wrap(module: Any, function: str) -> None:
    """Do nothing."""
