"""GPUs that torch can use, and the reasons why it cannot use a GPU that is present."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

from harness.errors import plural
from harness.tools.doctor.findings import Finding, System

GIB = 2**30
BUSY = 0.1  # of the memory
SETTINGS = [
    "index", "persistence_mode", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "clocks.sm",
    "clocks.max.sm", "memory.used", "memory.total", "compute_mode",
]  # fmt: skip
# {major version of CUDA: oldest driver on Linux}, with minor version compatibility: table 2 of
# https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/index.html
OLDEST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def cuda(system: System) -> Iterator[Finding]:
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    built = _built_for(torch.version)
    driver = _driver(system)
    if count:
        yield Finding("cuda", "ok", f"{_devices(count)}; torch is built for {built or 'the CPU only'}, driver {driver}")
        for index in range(count):
            yield _device(torch.cuda, index)
        yield from _settings(system)
        if count > 1:
            yield _peers(torch.cuda, count)
    else:
        yield _no_device(system, torch.__version__, built, driver, " ".join(str(warning.message) for warning in caught))


def _no_device(system: System, torch_version: str, built: str | None, driver: str | None, warning: str) -> Finding:
    hidden = system.variables.get("CUDA_VISIBLE_DEVICES")
    if driver is None:
        return Finding(
            "cuda", "ok", f"no NVIDIA driver: training runs on the CPU (torch is built for {built or 'the CPU only'})"
        )
    if not any(system.root.glob("dev/nvidia[0-9]*")):
        text = f"driver {driver}, but this container or machine has no device: training runs on the CPU"
        return Finding("cuda", "note", text, ("docker run --gpus all …, or request a GPU from your scheduler",))
    if built is None:
        text = f"driver {driver}, but torch {torch_version} is built for the CPU"
        return Finding("cuda", "problem", text, ("install a CUDA build: https://pytorch.org/get-started/locally",))
    if hidden is not None and re.fullmatch(r"\s*(-1)?\s*|NoDevFiles", hidden):
        text = f"CUDA_VISIBLE_DEVICES={hidden!r} hides all devices: training runs on the CPU"
        return Finding("cuda", "note", text, ("unset CUDA_VISIBLE_DEVICES",))
    if needed := _too_old(driver, built):
        return Finding(
            "cuda", "problem",
            f"driver {driver} is too old for {built}, which torch {torch_version} is built for: it needs {needed} or "
            "newer, so training runs on the CPU",
            (f"update the NVIDIA driver to {needed} or newer",
             "or install a torch for an older CUDA: https://pytorch.org/get-started/previous-versions"),
        )  # fmt: skip
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


def _too_old(driver: str, built: str) -> str | None:
    """The oldest driver for the CUDA that torch is built for, if ``driver`` is older."""
    major = re.match(r"CUDA (\d+)", built)
    needed = OLDEST_DRIVERS.get(int(major[1])) if major else None
    numbers = [[int(number) for number in re.findall(r"\d+", version)] for version in (driver, needed or "")]
    return needed if numbers[0] and numbers[0] < numbers[1] else None


def _settings(system: System) -> Iterator[Finding]:
    """Clocks, ECC and modes of each GPU as nvidia-smi prints them; nothing without it."""
    query = ["nvidia-smi", f"--query-gpu={','.join(SETTINGS)}", "--format=csv,noheader,nounits"]
    for line in system.output_of(query).splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(SETTINGS):
            continue
        index, persistence, ecc, errors, clock, max_clock, used, total, mode = values
        text = f"nvidia-smi: GPU {index}, clock {clock} of {max_clock} MHz, ECC {ecc}, persistence mode {persistence}"
        if errors.isdigit() and int(errors):
            fix = (f"nvidia-smi -i {index} -q -d ECC,ROW_REMAPPER; restart the machine, or have the GPU replaced",)
            yield Finding("cuda", "problem", f"{text}; {plural(int(errors), 'uncorrected memory error')}", fix)
        elif mode == "Prohibited":
            text += "; its compute mode allows no process"
            yield Finding("cuda", "problem", text, (f"sudo nvidia-smi -i {index} -c DEFAULT",))
        elif used.isdigit() and total.isdigit() and int(used) > BUSY * int(total):
            text += f"; {used} of {total} MiB of its memory is in use"
            yield Finding("cuda", "note", text, ("nvidia-smi  # which processes use it?",))
        elif persistence == "Disabled":
            text += ", so every training run first waits for the driver to load"
            yield Finding("cuda", "note", text, (f"sudo nvidia-smi -i {index} -pm 1",))
        else:
            yield Finding("cuda", "ok", text)


def _peers(torch_cuda: Any, count: int) -> Finding:
    """Check that each pair of GPUs can copy without the host."""
    pairs = [(first, second) for first in range(count) for second in range(first + 1, count)]
    without = [f"{a}-{b}" for a, b in pairs if not torch_cuda.can_device_access_peer(a, b)]
    if not without:
        return Finding("cuda", "ok", f"peer access between all devices ({count})")
    shown = ", ".join(without[:6]) + (", ..." if len(without) > 6 else "")
    text = f"GPU pairs without peer access: {shown}; they exchange gradients through the host's memory, which is slower"
    return Finding("cuda", "note", text, ("nvidia-smi topo -m  # how are they connected?",))


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
