"""Python, the required packages, the Apex that ``import apex`` would find, and the GPUs that torch can use."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.errors import plural
from harness.tools.doctor.findings import Finding, Mark, System

DISTRIBUTION = "apex-harness"
OLDEST_PYTHON = (3, 10)
GIB = 2**30


def python(system: System) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield Finding("python", "problem", f"{version} is too old (minimum: {oldest})", (f"install Python {oldest}",))
    else:
        yield Finding("python", "ok", f"{version}, {sys.executable}")


def packages(system: System) -> Iterator[Finding]:
    """The packages that setup.cfg requires, checked by their metadata without importing them."""
    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        text = "apex-harness is not installed (it runs from its folder), so its requirements are unknown"
        yield Finding("packages", "note", text, ("python -m pip install -e .",))
        return
    others = set(importlib.metadata.packages_distributions().get("harness", [])) - {DISTRIBUTION}
    for other in sorted(others):
        text = f"{other} installs a package named harness too, so their files overwrite each other"
        yield Finding("packages", "problem", text, (f"python -m pip uninstall {other}", "install apex-harness again"))
    wrong, fine = [], 0
    for name, oldest in (_parse(line) for line in required if ";" not in line):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append((name, oldest, f"{name} is missing"))
            continue
        if _numbers(version) < _numbers(oldest):
            wrong.append((name, oldest, f"{name} {version} is too old (minimum: {oldest})"))
        fine += 1
    for name, oldest, text in wrong:
        wanted = f"'{name}>={oldest}'" if oldest else name
        yield Finding("packages", "problem", text, (f"python -m pip install {wanted}",))
    if not wrong:
        yield Finding("packages", "ok", f"all {fine} required packages are installed")


def torch(system: System) -> Iterator[Finding]:
    for name in ("torch", "torchvision"):
        try:
            found = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:  # a library is missing; built for another torch
            remedy = "python -m pip install --force-reinstall torch torchvision  # together: their versions must match"
            yield Finding("torch", "problem", f"{name} cannot be imported: {error}", (remedy,))
            return
        yield Finding("torch", "ok", f"{name} {found.__version__}")


def _parse(requirement: str) -> tuple[str, str]:
    """("torch", "2.6") from "torch>=2.6"; an empty version if there is no minimum."""
    match = re.match(r"\s*([\w.-]+)[^>]*(?:>=\s*([\w.]+))?", requirement)
    return (match.group(1), match.group(2) or "") if match else (requirement, "")


def _numbers(version: str) -> list[int]:
    """[2, 6, 1] from "2.6.1+cu121"; trailing zeros are removed."""
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


# Apex: identified from files and metadata, because importing PyPI's apex fails

_SCRIPTS = "python -m harness.apex SCRIPT ARGS  # runs scripts that use `from apex import amp` unmodified"


@dataclass(frozen=True)
class InstalledApex:
    """The ``apex`` that an import would find: ``text`` describes it."""

    kind: Literal["none", "ours", "amp", "without amp", "pypi"]
    text: str


def find_apex() -> InstalledApex:
    if getattr(sys.modules.get("apex"), "__harness__", False):
        return InstalledApex("ours", "harness.apex itself, through harness.apex.install()")
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError):  # partly imported, without a spec
        spec = None
    if spec is None:
        return InstalledApex("none", "not installed, and not needed")
    folder = Path(next(iter(spec.submodule_search_locations or []), spec.origin or ""))
    try:
        distribution = importlib.metadata.distribution("apex")
        version, requirements = distribution.version, " ".join(distribution.requires or []).lower()
    except importlib.metadata.PackageNotFoundError:
        version, requirements = "of unknown version", ""
    if (folder / "amp").is_dir() and (folder / "parallel").is_dir():
        return InstalledApex("amp", f"Apex {version}, in {folder}")
    if "pyramid" in requirements:
        text = (
            f"PyPI's apex {version}: a toolkit for the Pyramid web framework that cannot be imported, not NVIDIA's Apex"
        )
        return InstalledApex("pypi", text)
    text = f"apex {version}, in {folder}, has no amp and parallel, which NVIDIA removed after 25.05"
    return InstalledApex("without amp", text)


def apex(system: System) -> Iterator[Finding]:
    found = find_apex()
    if found.kind == "pypi":
        yield Finding("apex", "problem", found.text, ("python -m pip uninstall apex", _SCRIPTS))
    elif found.kind == "without amp":
        yield Finding("apex", "note", found.text, (_SCRIPTS,))
    else:
        yield Finding("apex", "ok", found.text)


def backend(system: System) -> Iterator[Finding]:
    """The backend that ``precision.backend: auto`` selects. Imports an installed Apex only if it has amp."""
    import torch

    from harness.config.schema import PrecisionSection
    from harness.training import precision

    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda and find_apex().kind == "amp" else "cpu")
    chosen = precision.choose(PrecisionSection(), device).backend
    why = "" if on_cuda else " (the only choice on the CPU)"
    yield Finding("backend", "ok", f"precision.backend=auto uses {chosen}{why}")


# GPUs


def cuda(system: System) -> Iterator[Finding]:
    import torch

    from harness.distributed import cuda_driver
    from harness.distributed.cuda_driver import Reason

    marks: dict[Reason, Mark] = {Reason.NO_DRIVER: "ok", Reason.NO_DEVICE: "note", Reason.HIDDEN: "note"}
    count, warning = cuda_driver.count_devices()
    if count:
        built, driver = cuda_driver.built_for(torch.version), cuda_driver.driver_version(system.root)
        yield Finding(
            "cuda", "ok", f"{plural(count, 'device')}; torch is built for {built or 'the CPU only'}, driver {driver}"
        )
        for index in range(count):
            yield _device(torch.cuda, index)
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


def _runs_on(major: int, minor: int, architectures: list[str]) -> bool:
    """Binaries run on their major version with an equal or higher minor; ``compute_`` code on any newer device."""
    for kind, number in re.findall(r"(sm|compute)_(\d+)", " ".join(architectures)):
        version = (int(number[:-1]), int(number[-1]))
        if version <= (major, minor) and (kind == "compute" or version[0] == major):
            return True
    return any(architecture.startswith("gfx") for architecture in architectures)  # AMD: torch checks this itself
