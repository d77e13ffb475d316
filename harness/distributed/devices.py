"""The device of each rank, and broken devices."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import torch

from harness.distributed.no_cuda import Reason, why_none
from harness.errors import LaunchError, plural

log = logging.getLogger("harness")

ALL_ALIKE = (
    "run nvidia-smi and harness doctor on the machines without a CUDA device, or set runtime.device=cpu for all ranks"
)

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PROBE = "import torch; torch.ones(1, device='cuda').add_(1).item()"
_OPENS_S = 60.0

CPU_RANKS = 2  # enough to show how ranks work together, on any machine


def choose(device_name: str, local_rank: int, local_world_size: int, may_be_isolated: bool = False) -> torch.device:
    """Return the CUDA device of ``local_rank`` if CUDA is available, else the CPU. ``device_name``: auto, cpu or cuda.

    ``may_be_isolated``: the launcher may show each rank only its own device, as ``srun --gpus-per-task=1`` does; then a
    single visible device is this rank's. Raises LaunchError for too few devices, and for auto where this machine has a
    device that does not work.
    """
    if device_name == "cpu":
        return torch.device("cpu")
    if (count := _usable(device_name)) == 0:
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


def _usable(device_name: str) -> int:
    """Return the number of CUDA devices. Raises LaunchError if there are none because of a fault, or, for the device
    cuda, for any other reason; otherwise the reason is one line in the log."""
    count, warning = count_devices()
    if count:
        return count
    cause = why_none(warning, os.environ)
    if device_name == "cuda" or cause.reason is Reason.BROKEN:
        raise LaunchError(
            f"torch can use no CUDA device: {cause.text}",
            hint="; or ".join((*cause.remedies, "set runtime.device=cpu to train on the CPU")),
        )
    if cause.reason is not Reason.NO_DRIVER:
        log.info("%s: training runs on the CPU", cause.text)
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
    visible = os.environ.get(_VISIBLE)
    if visible is not None:
        return list(takewhile(lambda name: name and name[0] != "-", map(str.strip, visible.split(","))))  # as CUDA does
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
    working = []
    for name, probe in probes.items():
        try:
            if probe.wait(max(deadline - time.monotonic(), 0.0)) == 0:
                working.append(name)
        except subprocess.TimeoutExpired:
            probe.kill()  # without a wait: it may be blocked in the driver
    return working
