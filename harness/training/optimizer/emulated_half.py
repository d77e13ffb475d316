"""What a device does about a half-precision type for which it has no arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from harness.config.schema import PrecisionSection


@contextmanager
def half_on_cpu(section: PrecisionSection, device: torch.device) -> Iterator[None]:
    """Context in which a CPU computes products of float16 and bfloat16 tensors in float32, if ``section`` uses them and
    it has no arithmetic for them. Without it, O1 trains 15 to 60 times as slowly as O0 there, and O4 3 to 10 times."""
    library = None
    if _emulated(section, device):
        from harness.apex.on_cpu import half_kernels

        library = half_kernels.register(half_kernels.slow_dtypes())
    try:
        yield
    finally:
        if library is not None:
            library._destroy()  # torch has no public way to deregister kernels


def _emulated(section: PrecisionSection, device: torch.device) -> str:
    """Return the dtype of ``section`` for which ``device`` has no arithmetic; empty if there is none. Its products are
    computed in float32, on a GPU by CUDA."""
    if section.opt_level == "O0":
        return ""
    half = torch.bfloat16 if section.opt_level in ("O4", "O5") else torch.float16
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else True
        slow = set() if native else {torch.bfloat16}
    else:
        from harness.apex.on_cpu import half_kernels

        slow = half_kernels.slow_dtypes()
    return str(half).removeprefix("torch.") if half in slow else ""


def describe(section: PrecisionSection, device: torch.device, backend: str) -> str:
    """Return the level, the implementation, and what a device does about a dtype that it lacks, for the log."""
    text = f"{section.opt_level} by {backend}"
    if half := _emulated(section, device):
        name = "CPU" if device.type == "cpu" else "GPU"
        text += f"; on this {name}, matrix products are computed in float32 and rounded to {half}"
    return text


def warning(section: PrecisionSection, device: torch.device) -> str:
    """Return a warning if ``device`` has no arithmetic for the dtype of ``section``; empty otherwise."""
    half = _emulated(section, device)
    if not half:
        return ""
    name, other = (torch.cuda.get_device_name(device), "O1") if device.type == "cuda" else ("this CPU", "O0")
    default = "" if "opt_level" in section.model_fields_set else ", the default"
    return (
        f"{name} has no arithmetic for {half}; at {section.opt_level}{default}, its products are computed in float32 "
        f"and rounded; use precision.opt_level={other}"
    )
