"""The device of each rank, the check that no two ranks share one, the devices that work, and what a CPU does with freed
memory."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from harness.distributed import cuda_driver
from harness.distributed.cuda_driver import Reason
from harness.errors import LaunchError, plural

log = logging.getLogger("harness")

ALL_ALIKE = (
    "run nvidia-smi and harness doctor on the machines without a CUDA device, or set runtime.device=cpu for all ranks"
)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_LARGEST_KEPT = 32 * 2**20  # the largest _MMAP_THRESHOLD that glibc takes

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PROBE = "import torch; torch.ones(1, device='cuda').add_(1).item()"
_OPENS_S = 60.0

CPU_RANKS = 2  # enough to show how ranks work together, on any machine


def choose(wanted: str, local_rank: int, local_world_size: int, may_be_isolated: bool = False) -> torch.device:
    """The CUDA device of ``local_rank`` if CUDA is available, else the CPU; ``wanted`` is auto, cpu or cuda.

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
    """The number of CUDA devices. Raises LaunchError if there are none because of a fault, or, for the device cuda, for
    any other reason; otherwise the reason is one line in the log."""
    count, warning = cuda_driver.count_devices()
    if count:
        return count
    found = cuda_driver.why_none(warning, os.environ)
    if wanted == "cuda" or found.reason is Reason.BROKEN:
        raise LaunchError(
            f"torch can use no CUDA device: {found.text}",
            hint="; ".join((*found.remedies, "or set runtime.device=cpu to train on the CPU")),
        )
    if found.reason is not Reason.NO_DRIVER:
        log.info("%s: training runs on the CPU", found.text)
    return 0


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU, make malloc keep freed blocks of up to 32 MiB for later use instead of returning them to the system.

    Every training step frees its activations. By default, glibc then returns most of them, and the kernel has to map
    and clear the same pages again in the next step. Settings of malloc in the environment take precedence.
    """
    own = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if device.type == "cpu" and sys.platform == "linux" and not own:
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if set_option is not None:
            set_option(_MMAP_THRESHOLD, _LARGEST_KEPT)
            set_option(_TRIM_THRESHOLD, -1)


def fitting_ranks(most: int | None = None, on_cpu: bool = False) -> int:
    """The number of ranks that fit this machine, at most ``most``: one per visible CUDA device, else 2. Raises
    LaunchError, unless ``on_cpu``, for a device that does not work."""
    count = 0 if on_cpu else _usable("auto")
    return min(count or CPU_RANKS, most or sys.maxsize)


def names() -> list[str]:
    """The CUDA devices of this machine as CUDA_VISIBLE_DEVICES names them: those that it names, else all."""
    shown = os.environ.get(_VISIBLE)
    if shown is not None:
        return [name for name in map(str.strip, shown.split(",")) if name and not name.startswith("-")]
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def opening(names: Sequence[str]) -> list[str]:
    """Those of ``names`` on which a new process can compute, within a minute: a broken device may block it for ever."""
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


def card(device: torch.device) -> str:
    """A name that identifies a CUDA device on any host; empty for a CPU."""
    if device.type == "cpu":
        return ""
    visible = os.environ.get(_VISIBLE, "").split(",")
    if device.index < len(visible) and visible[device.index].startswith("MIG"):
        return visible[device.index]  # a MIG slice; all slices of a card may share its UUID
    return str(torch.cuda.get_device_properties(device).uuid)


def check_own(cards: Sequence[tuple[str, str]]) -> None:
    """Raise LaunchError if two ranks use one card. ``cards``: host and card name, by rank."""
    first: dict[str, int] = {}
    for rank, (host, name) in enumerate(cards):
        if name and name in first:
            raise LaunchError(
                f"ranks {first[name]} and {rank} both use the CUDA device {name} of {host}",
                hint="give each rank its own device: srun --gpus-per-task=1, or one visible GPU per rank on each node",
            )
        first[name] = rank
