"""GPUs that torch can use, and the reasons why it cannot use a GPU that is present."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

from harness.doctor.findings import Finding, System

GIB = 2**30


def cuda(system: System) -> Iterator[Finding]:
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    built = _built_for(torch.version)
    driver = _driver(system)
    if count:
        yield Finding("cuda", "ok", f"{_devices(count)}; torch is built for {built or 'it'}, driver {driver}")
        for index in range(count):
            yield _device(torch.cuda, index)
    else:
        yield _no_device(system, torch.__version__, built, driver, " ".join(str(warning.message) for warning in caught))


def _no_device(system: System, torch_version: str, built: str | None, driver: str | None, warning: str) -> Finding:
    hidden = system.variables.get("CUDA_VISIBLE_DEVICES")
    if driver is None:
        return Finding("cuda", "ok", f"no NVIDIA driver: training runs on the CPU (torch is built for {built or 'it'})")
    if not any(system.root.glob("dev/nvidia[0-9]*")):
        text = f"driver {driver}, but this container or machine has no device: training runs on the CPU"
        return Finding("cuda", "note", text, ("docker run --gpus all …, or request a GPU from your scheduler",))
    if built is None:
        text = f"driver {driver}, but torch {torch_version} is built for the CPU"
        return Finding("cuda", "problem", text, ("install a CUDA build: https://pytorch.org/get-started/locally",))
    if hidden is not None and re.fullmatch(r"\s*(-1)?\s*|NoDevFiles", hidden):
        text = f"CUDA_VISIBLE_DEVICES={hidden!r} hides all devices: training runs on the CPU"
        return Finding("cuda", "note", text, ("unset CUDA_VISIBLE_DEVICES",))
    text = f"driver {driver} and torch built for {built}, but no device is usable: {warning or 'torch gives no reason'}"
    return Finding(
        "cuda",
        "problem",
        text,
        (
            "nvidia-smi  # does the driver respond, and is its CUDA version at least that of torch?",
            "update the driver, or install an older CUDA build: https://pytorch.org/get-started/previous-versions",
        ),
    )


def _device(torch_cuda: Any, index: int) -> Finding:
    it = torch_cuda.get_device_properties(index)
    text = f"cuda:{index} {it.name}, {it.total_memory / GIB:.1f} GiB, compute capability {it.major}.{it.minor}"
    architectures = torch_cuda.get_arch_list()
    if architectures and not _runs_on(it.major, it.minor, architectures):
        text += f", for which this torch has no kernels ({' '.join(architectures)})"
        return Finding(
            "cuda", "problem", text, ("install another build: https://pytorch.org/get-started/previous-versions",)
        )
    return Finding("cuda", "ok", text)


def _runs_on(major: int, minor: int, architectures: list[str]) -> bool:
    """Binaries run on their major version with an equal or higher minor; ``compute_`` code on any newer device."""
    for kind, number in re.findall(r"(sm|compute)_(\d+)", " ".join(architectures)):
        version = (int(number[:-1]), int(number[-1]))
        if version <= (major, minor) and (kind == "compute" or version[0] == major):
            return True
    return any(architecture.startswith("gfx") for architecture in architectures)  # AMD: torch checks this itself


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _built_for(version: Any) -> str | None:
    if version.cuda:
        return f"CUDA {version.cuda}"
    return f"ROCm {version.hip}" if getattr(version, "hip", None) else None


def _driver(system: System) -> str | None:
    """The version of the kernel's NVIDIA driver, read from a file because a call into a broken driver may hang."""
    try:
        text = (system.root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match.group(1) if match else "of unknown version"


def mps(system: System) -> Iterator[Finding]:
    import torch

    if torch.backends.mps.is_available():
        yield Finding("mps", "note", "the harness does not use Apple GPUs: training runs on the CPU")
