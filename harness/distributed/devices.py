"""The device of each rank; broken devices; why torch can use none of a machine, and what to install then."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from harness.errors import LaunchError, plural

log = logging.getLogger("harness")

ALL_ALIKE = (
    "run nvidia-smi and harness doctor on the machines without a CUDA device, or set runtime.device=cpu for all ranks"
)

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PROBE = "import torch; torch.ones(1, device='cuda').add_(1).item()"
_OPENS_S = 60.0

PREVIOUS_VERSIONS = "https://pytorch.org/get-started/previous-versions"
_ROOT = Path("/")
CPU_RANKS = 2  # enough to show how ranks work together, on any machine


def choose(wanted: str, local_rank: int, local_world_size: int, may_be_isolated: bool = False) -> torch.device:
    """Return the CUDA device of ``local_rank`` if CUDA is available, else the CPU. ``wanted`` is auto, cpu or cuda.

    ``may_be_isolated``: the launcher may show each rank only its own device, as ``srun --gpus-per-task=1`` does; then a
    single visible device is this rank's. Raises LaunchError for too few devices, and for auto where this machine has a
    device that does not work.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    if (count := _usable(wanted)) == 0:
        return torch.device("cpu")
    if may_be_isolated and count == 1:
        return torch.device("cuda", 0)
    if local_world_size > count or local_rank >= count:
        raise LaunchError(
            f"this node has {plural(count, 'visible CUDA device')} for {plural(local_world_size, 'process')}; "
            "each process needs its own",
            hint=f"start at most {plural(count, 'process')} on this node",
        )
    return torch.device("cuda", local_rank)


def _usable(wanted: str) -> int:
    """Return the number of CUDA devices. Raises LaunchError if there are none because of a fault, or, for the device
    cuda, for any other reason; otherwise the reason is one line in the log."""
    count, warning = count_devices()
    if count:
        return count
    found = why_none(warning, os.environ)
    if wanted == "cuda" or found.reason is Reason.BROKEN:
        raise LaunchError(
            f"torch can use no CUDA device: {found.text}",
            hint="; or ".join((*found.remedies, "set runtime.device=cpu to train on the CPU")),
        )
    if found.reason is not Reason.NO_DRIVER:
        log.info("%s: training runs on the CPU", found.text)
    return 0


def count_devices() -> tuple[int, str]:
    """Return the number of CUDA devices that torch can use, and its warnings if it can use none. torch gives them only
    the first time that it is asked in a process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, " ".join(str(warning.message) for warning in caught)


def fitting_ranks(most: int | None = None, on_cpu: bool = False) -> int:
    """Return the number of ranks that fit this machine, at most ``most``: one per visible CUDA device, else 2. Raises
    LaunchError, unless ``on_cpu``, for a device that does not work."""
    count = 0 if on_cpu else _usable("auto")
    return min(count or CPU_RANKS, most or sys.maxsize)


def visible_names() -> list[str]:
    """Return the CUDA devices of this machine as CUDA_VISIBLE_DEVICES names them: those that it names, else all."""
    shown = os.environ.get(_VISIBLE)
    if shown is not None:
        return list(takewhile(lambda name: name and name[0] != "-", map(str.strip, shown.split(","))))  # as CUDA does
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def working_names(names: Sequence[str]) -> list[str]:
    """Return those of ``names`` on which a new process can compute. It gets a minute: a broken device may block it for
    ever."""
    deadline = time.monotonic() + _OPENS_S
    probes = {
        name: subprocess.Popen(
            [sys.executable, "-c", _PROBE], env={**os.environ, _VISIBLE: name}, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for name in names
    }  # fmt: skip
    found = []
    for name, probe in probes.items():
        try:
            if probe.wait(max(deadline - time.monotonic(), 0.0)) == 0:
                found.append(name)
        except subprocess.TimeoutExpired:
            probe.kill()  # without a wait: it may be blocked in the driver
    return found


# Why there is none


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
    hidden = variables.get(_VISIBLE)
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
