"""Which device a rank computes on, and that no two ranks compute on one. Nothing here knows how ranks were started."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from harness.errors import LaunchError


def choose(wanted: str, local_rank: int, local_world_size: int, dealt: bool = False) -> torch.device:
    """The CUDA device of ``local_rank`` where there is one, else the CPU; ``wanted`` is auto, cpu or cuda.

    ``dealt``: the launcher may have given each rank a device of its own and hidden the others, as ``srun
    --gpus-per-task=1`` does; then a single visible device is this rank's. Raises LaunchError for too few devices.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if dealt and count == 1:
        return torch.device("cuda", 0)
    if local_world_size > count or local_rank >= count:
        raise LaunchError(
            f"{local_world_size} process(es) of this node want a CUDA device each; there are {count} here",
            hint=f"start at most {count} processes on this node"
            if count
            else "use runtime.device=cpu, or install a CUDA build of torch and a driver",
        )
    return torch.device("cuda", local_rank)


def card(device: torch.device) -> str:
    """What tells a CUDA device from all others, on any host; empty for a CPU."""
    if device.type == "cpu":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if device.index < len(visible) and visible[device.index].startswith("MIG"):
        return visible[device.index]  # a slice; the card's own number may be that of all its slices
    return str(torch.cuda.get_device_properties(device).uuid)


def check_own(cards: Sequence[tuple[str, str]]) -> None:
    """Raise LaunchError where two ranks have one card, or only some have any. ``cards``: host and card, by rank."""
    first: dict[str, int] = {}
    for rank, (host, name) in enumerate(cards):
        if bool(name) != bool(cards[0][1]):
            without = host if cards[0][1] else cards[0][0]
            raise LaunchError(
                f"ranks 0 and {rank} are on different kinds of device: {without} has no CUDA device",
                hint="look at it with nvidia-smi and harness doctor, or have all ranks use runtime.device=cpu",
            )
        if name and name in first:
            raise LaunchError(
                f"ranks {first[name]} and {rank} both took the CUDA device {name} of {host}",
                hint="give each a device of its own: srun --gpus-per-task=1, or one GPU a rank visible on each node",
            )
        first[name] = rank
