"""Why torch can use no CUDA device of this machine, and what to install then."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

PREVIOUS_VERSIONS = "https://pytorch.org/get-started/previous-versions"
_ROOT = Path("/")


class Reason(Enum):
    """Why there is no CUDA device."""

    NO_DRIVER = "this machine has no NVIDIA driver"
    NO_DEVICE = "the driver shows no device to this container or machine"
    CPU_BUILD = "torch is built without CUDA"
    HIDDEN = "CUDA_VISIBLE_DEVICES hides the devices"
    BROKEN = "there is a device, and torch is built for CUDA, but it does not work"


@dataclass(frozen=True)
class NoCuda:
    """A ``reason`` with its ``text`` for the user, and ``remedies``: what to type, or to install."""

    reason: Reason
    text: str
    remedies: tuple[str, ...] = ()


def why_none(warning: str, variables: Mapping[str, str], root: Path | None = None) -> NoCuda:
    """Return the reason why ``count_devices`` found none, with its ``warning``. ``variables``: of the environment;
    ``root``: of the file system."""
    root = _ROOT if root is None else root
    built, driver = built_for(torch.version), driver_version(root)
    has_device = any(root.glob("dev/nvidia[0-9]*"))
    too_old = "driver on your system is too old" in warning  # also in WSL, where the driver has no such files
    if driver is None and not has_device and not too_old:
        text = f"no NVIDIA driver (torch is built for {built or 'the CPU only'})"
        return NoCuda(Reason.NO_DRIVER, text)
    driver = driver or "of unknown version"
    if not has_device and not too_old:  # a container sees the file of its host's driver, but not the devices
        text = f"driver {driver}, but this container or machine has no device"
        return NoCuda(Reason.NO_DEVICE, text, ("docker run --gpus all …, or request a GPU from your scheduler",))
    if built is None:
        text = f"driver {driver}, but torch {torch.__version__} is built for the CPU"
        return NoCuda(Reason.CPU_BUILD, text, ("install a CUDA build: https://pytorch.org/get-started/locally",))
    hidden = variables.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and re.fullmatch(r"\s*(-\d+.*)?\s*|NoDevFiles", hidden):
        text = f"CUDA_VISIBLE_DEVICES={hidden!r} hides all devices"
        return NoCuda(Reason.HIDDEN, text, ("unset CUDA_VISIBLE_DEVICES",))
    visible = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden})"
    text = f"driver {driver} and torch built for {built}, but no device is usable{visible}: "
    return NoCuda(
        Reason.BROKEN,
        text + (warning or "torch gives no reason"),
        (
            "nvidia-smi  # does the driver respond, and is its CUDA version at least that of torch?",
            f"update the driver, or install a torch for an older CUDA; see {PREVIOUS_VERSIONS}",
        ),
    )


def built_for(version: Any) -> str | None:
    """Return "CUDA 13.2" or "ROCm 6.4", from ``torch.version``; None for a build for the CPU."""
    if version.cuda:
        return f"CUDA {version.cuda}"
    return f"ROCm {version.hip}" if getattr(version, "hip", None) else None


def driver_version(root: Path) -> str | None:
    """Return the version of the kernel's NVIDIA driver, read from a file because a call into a broken driver may
    hang."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match.group(1) if match else "of unknown version"
