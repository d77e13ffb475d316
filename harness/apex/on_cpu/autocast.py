"""Replaces autocast and GradScaler for CUDA by those for the CPU, with CUDA's default dtype."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.amp import autocast_mode, grad_scaler

from harness.apex.call_counter import count
from harness.apex.on_cpu.device_arguments import Replacement, takes_device
from harness.apex.on_cpu.placement import names_cuda


def replacements() -> Iterator[Replacement]:
    """(owner, attribute, replacement) of everything that this module redirects."""
    autocast, scaler, autocast_dtype = autocast_mode.autocast, grad_scaler.GradScaler, torch.get_autocast_dtype
    yield autocast, "__init__", _autocast(autocast.__init__, default=autocast_dtype("cuda"))
    # custom_fwd(cast_inputs=) casts the arguments of one device type with it
    yield autocast_mode, "_cast", takes_device(autocast_mode._cast, None, position=1, keyword="device_type")
    name = "torch.amp.GradScaler(cuda)"
    yield scaler, "__init__", takes_device(scaler.__init__, name, position=1, default="cuda", count=count)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        query = getattr(torch, name)
        yield torch, name, takes_device(query, None, position=0, keyword="device_type", default="cuda")
    yield torch, "get_autocast_gpu_dtype", lambda: autocast_dtype("cpu")


def _autocast(original: Any, default: torch.dtype) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if names_cuda(device_type):
            count("torch.autocast(cuda)")
            device_type, dtype = "cpu", dtype if dtype is not None else default
        original(self, device_type, dtype, *args, **kwargs)

    return __init__
