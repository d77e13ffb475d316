"""Random number streams of a rank: seeded from (purpose, seed, ...), saved and restored as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from harness.data.seeds import derive


def seed_all(*key: int) -> None:
    """Seed torch (all devices), NumPy and ``random`` from ``key``."""
    seed = derive(*key)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def get_state(*devices: torch.device) -> dict[str, Any]:
    """The state of every stream of this rank, which computes on ``devices``, as tensors and plain numbers (loads with
    ``weights_only=True``)."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
        "python": [version, list(internal), gauss_next],
    }


def set_state(state: dict[str, Any], *devices: torch.device) -> None:
    """Restore the state that ``get_state`` returned."""
    torch.set_rng_state(state["torch"].cpu())
    for device, saved in zip((each for each in devices if each.type == "cuda"), state["cuda"], strict=False):
        torch.cuda.set_rng_state(saved.cpu(), device)
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
