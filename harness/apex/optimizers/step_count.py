"""The number of steps of a parameter group, for the corrections of Adam and its relatives."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.apex.optimizers.batch import Group


class StepCount:
    """Counts the steps of groups in ``group["step"]``, where checkpoints have it:

    - as a number, if the host knows that no step is skipped;
    - as a number that is corrected later, if only the device knows (``found_inf``) which steps are skipped: the device
      subtracts those that the host has counted, until ``take_back`` tells the host of each;
    - in a tensor on the device, which a CUDA graph can capture, for ``capturable`` optimizers.
    """

    def __init__(self) -> None:
        self._skipped: dict[int, Tensor] = {}  # by id of a group: skipped steps in its number, as the device knows

    def advance(self, group: Group, found_inf: Tensor | None, capturable: bool) -> Group:
        """Count a step. Returns ``group``, or a copy with the number of this step as the device knows it."""
        if capturable:
            if "step" not in group:
                group["step"] = torch.zeros(1, dtype=torch.int32, device=group["params"][0].device)
            group["step"] += 1 if found_inf is None else (found_inf == 0).to(group["step"].device)
            return group
        group["step"] = group.get("step", 0) + 1
        if found_inf is None:
            return group
        before = self._skipped.get(id(group), found_inf.new_zeros(()))
        self._skipped[id(group)] = before + (found_inf != 0)
        return {**group, "step": torch.full((), float(group["step"]), device=found_inf.device) - before}

    def take_back(self, group: Group) -> None:
        """Correct the number of ``group`` by a step that the device has skipped."""
        if id(group) in self._skipped:
            group["step"] -= 1
            self._skipped[id(group)] = self._skipped[id(group)] - 1


def step_for_kernel(group: Group, device: torch.device) -> Tensor:
    """Return ``group["step"]`` for torch's fused Adam kernels.

    Without bias correction it is infinity, at which the kernels' correction ``1 - beta**step`` is 1.
    """
    step = group["step"] if group["bias_correction"] else math.inf
    if isinstance(step, Tensor):
        return step.to(device, torch.float32)
    # whatever the default dtype is: the kernels of CUDA read float32
    return torch.full((), step, dtype=torch.float32, device=device)
