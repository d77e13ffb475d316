"""Record the work of a function on a CUDA device, and repeat it: a CUDA graph."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from harness.errors import TrainingError, first_line


class Recorder(Protocol):
    """Records the work of a function on a device."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Call ``function`` once without doing its work; return what does the work, in the same memory each time."""

    def close(self) -> None:
        """End the use of the device."""


class CudaRecorder:
    """CUDA graphs of one memory pool, on a stream that this thread uses from here on for all its work.

    A graph cannot be recorded on the default stream, and backward passes of earlier steps must have run on the same.
    """

    def __init__(self, device: torch.device) -> None:
        self._before, self._own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        self._own.wait_stream(self._before)
        torch.cuda.set_stream(self._own)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, which pin memory for the loader, may allocate meanwhile.
        with torch.cuda.graph(graph, self._pool, self._own, capture_error_mode="thread_local"):
            function()
        return graph.replay

    def close(self) -> None:
        self._before.wait_stream(self._own)
        torch.cuda.set_stream(self._before)


def recorded(
    recorder: Recorder, work: Callable[[], None], tensors: Callable[[], dict[str, Tensor]]
) -> Callable[[], None]:
    """``recorder.record(work)``. Raises TrainingError if ``work`` cannot be repeated; it must keep ``tensors``, by
    their names, in their places."""
    hint, errors = "set train.cuda_graphs=false", list[Exception]()
    before, places = _host_random(), _places(tensors())

    def watched() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)
            raise

    try:
        replay = recorder.record(watched)
    except torch.OutOfMemoryError:
        raise  # explained elsewhere
    except Exception as error:
        first = errors[0] if errors else error  # the end of a failed recording raises an error of its own
        raise TrainingError(
            f"the training step cannot be recorded as a CUDA graph: {first_line(first)}",
            hint=f"{hint}; or remove every read of a value on the device (.item(), print, `if tensor:`) from the "
            "model, the loss and prepare()",
        ) from first
    if _host_random() != before:
        raise TrainingError(
            "the training step draws random numbers on the host, which a CUDA graph would repeat in every step",
            hint=f"{hint}; or draw them on the device of the model's inputs",
        )
    if moved := [name for name, place in _places(tensors()).items() if places.get(name) != place]:
        raise TrainingError(
            f"the training step makes a new tensor for {moved[0]}, but a CUDA graph always reads the old one",
            hint=f"{hint}; or write to the old one, as in buffer.copy_(new)",
        )
    return replay


def _places(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def _host_random() -> bytes:
    """The states of the random streams that are not part of a CUDA graph."""
    torchs = torch.get_rng_state().numpy() if torch.cuda.is_available() else None  # else it is the device's
    return pickle.dumps((random.getstate(), np.random.get_state(), torchs))
