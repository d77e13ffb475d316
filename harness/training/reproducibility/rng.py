"""Random number streams of a rank: seeded from (purpose, seed, ...), saved and restored."""

from __future__ import annotations

import ctypes
import random
import sys
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


NumpyState = tuple[str, np.ndarray, int, int, float]


class Streams(NamedTuple):
    """The state of every stream of a rank, as the libraries give it."""

    torch: Tensor
    devices: Sequence[Tensor]
    numpy: NumpyState
    python: tuple[Any, ...]

    def plain(self) -> dict[str, Any]:
        """Return the state as tensors and plain numbers, which load with ``weights_only=True``."""
        name, keys, position, has_gauss, gauss = self.numpy
        version, internal, gauss_next = self.python
        words = torch.from_numpy(np.asarray(keys, dtype=np.int64))
        return {
            "torch": self.torch,
            "cuda": list(self.devices),
            "numpy": [str(name), words, int(position), int(has_gauss), float(gauss)],
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
    return Streams(torch.get_rng_state(), on_devices, _numpy.get(), random.getstate())


def set_state(state: Streams, *devices: torch.device) -> None:
    """Restore the state that ``get_state`` returned."""
    torch.set_rng_state(state.torch)
    for device, of_device in zip((each for each in devices if each.type == "cuda"), state.devices, strict=False):
        torch.cuda.set_rng_state(of_device, device)
    _numpy.set(state.numpy)
    random.setstate(state.python)


class _NumpyStream:
    """The state of NumPy's global generator, which NumPy itself takes 0.1 ms to return and 0.1 ms to set, number by
    number. Where nothing has drawn since the last call, its memory is copied instead.

    The second half of a pair of normal numbers, which waits for the next call, is not in that memory. A state that has
    one is never ``_known``, and a draw that leaves one moves the position.
    """

    _BYTES = 625 * 4  # 624 words of the generator and a position
    _known: bytes | None = None  # the memory after the last call; None if it would not tell everything

    def get(self) -> NumpyState:
        content = self._memory()
        if content is not None and content == self._known:
            words = np.frombuffer(content, dtype=np.uint32)
            return "MT19937", words[:624], int(words[624]), 0, 0.0
        state: NumpyState = np.random.get_state(legacy=True)  # type: ignore[assignment]
        self._remember(state)
        return state

    def set(self, state: NumpyState) -> None:
        content, packed = self._memory(), self._packed(state)
        if content is not None and content == self._known and packed is not None:
            ctypes.memmove(_global_generator().ctypes.state_address, packed, self._BYTES)
            self._known = packed
        else:
            np.random.set_state(state)
            self._remember(state)

    def _remember(self, state: NumpyState) -> None:
        packed = self._packed(state)
        self._known = packed if packed is not None and packed == self._memory() else None

    def _memory(self) -> bytes | None:
        generator = _global_generator()
        if type(generator) is not np.random.MT19937:
            return None
        return ctypes.string_at(generator.ctypes.state_address, self._BYTES)

    def _packed(self, state: NumpyState) -> bytes | None:
        """Return the memory of a generator in ``state``; None if that is not the whole state."""
        name, keys, position, has_gauss, gauss = state
        if name != "MT19937" or has_gauss or gauss:
            return None
        return np.asarray(keys, np.uint32).tobytes() + position.to_bytes(4, sys.byteorder)


def _global_generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]  # which NumPy's own annotations lack


_numpy = _NumpyStream()
