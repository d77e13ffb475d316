"""GPUs that torch can use, and the reasons why it cannot use a GPU that is present."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from harness.errors import plural
from harness.tools.doctor.findings import Finding, Mark, System

GIB = 2**30
BUSY = 0.1  # of the memory
SETTINGS = [
    "index", "persistence_mode", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "clocks.sm",
    "clocks.max.sm", "memory.used", "memory.total", "compute_mode",
]  # fmt: skip


def cuda(system: System) -> Iterator[Finding]:
    import torch

    from harness.distributed import cuda_driver
    from harness.distributed.cuda_driver import Reason

    marks: dict[Reason, Mark] = {Reason.NO_DRIVER: "ok", Reason.NO_DEVICE: "note", Reason.HIDDEN: "note"}
    count, warning = cuda_driver.count_devices()
    if count:
        built, driver = cuda_driver.built_for(torch.version), cuda_driver.driver_version(system.root)
        yield Finding("cuda", "ok", f"{_devices(count)}; torch is built for {built or 'the CPU only'}, driver {driver}")
        for index in range(count):
            yield _device(torch.cuda, index)
        yield from _settings(system)
        if count > 1:
            yield _peers(torch.cuda, count)
    else:
        found = cuda_driver.why_none(warning, system.variables, system.root)
        then = "does not start" if found.reason is Reason.BROKEN else "runs on the CPU"
        text = f"{found.text}: training {then}"
        yield Finding("cuda", marks.get(found.reason, "problem"), text, found.remedies)


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


def mps(system: System) -> Iterator[Finding]:
    import torch

    if torch.backends.mps.is_available():
        yield Finding(
            "mps",
            "note",
            "the harness does not use Apple GPUs, for which torch has no gloo or nccl: training runs on the CPU",
        )
