"""Random number streams of a rank: seeded from (purpose, seed, ...), saved and restored."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.data.seeds import derive


def seed_all(*key: int) -> None:
    """Seed torch (all devices), NumPy and ``random`` from ``key``."""
    seed = derive(*key)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class Streams(NamedTuple):
    """The state of every stream of a rank, as the libraries give it."""

    torch: Tensor
    devices: Sequence[Tensor]
    numpy: Any
    python: tuple[Any, ...]

    def plain(self) -> dict[str, Any]:
        """Return the state as tensors and plain numbers, which load with ``weights_only=True``."""
        name, keys, position, has_gauss, gauss = self.numpy
        version, internal, gauss_next = self.python
        keys = torch.from_numpy(np.asarray(keys, dtype=np.int64))
        return {
            "torch": self.torch,
            "cuda": list(self.devices),
            "numpy": [str(name), keys, int(position), int(has_gauss), float(gauss)],
            "python": [version, list(internal), gauss_next],
        }

    @classmethod
    def from_plain(cls, state: dict[str, Any]) -> Streams:
        """Return the state that ``plain`` returned; tensors may have been loaded onto any device."""
        name, keys, *others = state["numpy"]
        version, internal, gauss_next = state["python"]
        return cls(
            state["torch"].cpu(),
            [of_device.cpu() for of_device in state["cuda"]],
            (name, keys.numpy().astype(np.uint32), *others),
            (version, tuple(internal), gauss_next),
        )


def get_state(*devices: torch.device) -> Streams:
    """Return the state of every stream of this rank, which computes on ``devices``."""
    on_devices = [torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"]
    return Streams(torch.get_rng_state(), on_devices, np.random.get_state(legacy=True), random.getstate())


def set_state(state: Streams, *devices: torch.device) -> None:
    """Restore the state that ``get_state`` returned."""
    torch.set_rng_state(state.torch)
    for device, of_device in zip((each for each in devices if each.type == "cuda"), state.devices, strict=False):
        torch.cuda.set_rng_state(of_device, device)
    np.random.set_state(state.numpy)
    random.setstate(state.python)
