"""The arithmetic of a model, and how much of a GPU's peak a run uses.

Model FLOPs per row are those of the forward pass times three, because the backward pass needs about twice as many
(Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B). What activation checkpointing computes again does
not count, nor does it matter here that frozen layers need less.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.config.schema import PrecisionSection
from harness.training import rng
from harness.training.task import OpenedTask

# Dense peak of the tensor cores in FLOP/s: {words of the device's name: (float16 and bfloat16, TF32)}; the
# first match counts. From NVIDIA's data sheets, half of the figures given there "with sparsity".
PEAKS: dict[str, tuple[float, float]] = {
    "B200": (2250e12, 1100e12),
    "H200": (989e12, 494e12),
    "H100 PCIe": (756e12, 378e12),
    "H100 NVL": (835e12, 417e12),
    "H100": (989e12, 494e12),
    "A100": (312e12, 156e12),
    "L40S": (362e12, 183e12),
    "L4": (121e12, 60e12),
    "A10": (125e12, 62.5e12),
    "V100": (125e12, 0.0),
    "T4": (65e12, 0.0),
}


@dataclass(frozen=True)
class Arithmetic:
    """The operations of the model, and the peak of the device."""

    per_row: int | None = None  # FLOPs of forward and backward
    peak: float | None = None  # FLOP/s of one device
    operations: int | None = None  # of torch in a forward pass, each of which the host starts

    def rates(self, rows_per_s: float, world_size: int) -> dict[str, float]:
        """``tflops``: 10^12 FLOP/s over all ranks; ``mfu``: the share of the devices' peak, model FLOPs utilization."""
        if self.per_row is None:
            return {}
        rate = self.per_row * rows_per_s
        return {"tflops": rate / 1e12, **({"mfu": rate / (self.peak * world_size)} if self.peak else {})}


Counting = Callable[[], Arithmetic]


def of_run(model: nn.Module, task: OpenedTask, section: PrecisionSection, device: torch.device) -> Counting:
    """A function that counts without computing anything. Call it once the first steps are done: it imports modules for
    longer than they take. What cannot be counted is None.

    It runs a copy of the model, as it is now, on the meta device, which needs no memory and changes neither ``model``,
    with its Python attributes, nor a random stream.
    """
    tensors = [*model.parameters(), *model.buffers()]
    states = rng.get_state(torch.device("cpu"))
    try:
        row = task.prepare(task.train.batch(np.zeros(1, np.int64), 0).inputs)
        inputs = torch.cat([row, row]).to("meta")  # two rows: batch norm refuses one
        copied = deepcopy(model, {id(tensor): torch.empty_like(tensor, device="meta") for tensor in tensors})
    except Exception:  # of the user's own model or task; training reports real faults
        return Arithmetic
    finally:
        rng.set_state(states, torch.device("cpu"))
    return lambda: _count(copied, inputs, peak(device, section))


class _Operations(TorchDispatchMode):
    """Counts the operations that torch carries out; views cost as much time of the host as others."""

    found = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += 1
        return function(*args, **(kwargs or {}))


def _count(model: nn.Module, inputs: Tensor, peak: float | None) -> Arithmetic:
    from torch.utils import flop_counter  # late: it imports triton

    states = rng.get_state(torch.device("cpu"))
    try:
        counter = flop_counter.FlopCounterMode(display=False)
        with _Operations() as operations, counter, torch.no_grad():
            model(inputs)
    except Exception:  # of the user's own model, or an operation without a meta kernel
        return Arithmetic()
    finally:
        rng.set_state(states, torch.device("cpu"))
    return Arithmetic(3 * int(counter.get_total_flops()) // 2 or None, peak, operations.found or None)


def peak(device: torch.device, section: PrecisionSection) -> float | None:
    """The peak of ``device`` in FLOP/s at the precision of ``section``; None if it is not known, as on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    found = next((PEAKS[part] for part in PEAKS if re.search(rf"\b{part}\b", name)), None)  # "A10" is not in "A100"
    if found is None or (section.opt_level == "O0" and not section.tf32):
        return None
    return (found[1] if section.opt_level == "O0" else found[0]) or None
