"""``DeviceScale``: the loss scale of steps that a CUDA graph repeats, which the host starts but does not follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from harness.apex.amp.scaler import FACTOR, WINDOW, LossScaler


class DeviceScale:
    """Replaces ``scaler`` in steps with one ``scale_loss`` each: scale, overflow check and skip stay on ``device``.

    ``start`` takes over the host's scale. Later the host reads ``found`` of every step and calls ``count`` for each;
    its scale is then what it would be without graphs, bit for bit. ``optimizer`` must read ``found_inf``, as torch's
    fused ones do: they change nothing where it is 1.
    """

    def __init__(self, scaler: LossScaler, device: torch.device) -> None:
        self.scaler = scaler
        self.scale = torch.ones((), dtype=torch.float64, device=device)  # float64, as the host's
        self.found = torch.zeros((), device=device)  # 1 if the step overflowed and is skipped
        self._clean = torch.zeros((), dtype=torch.int64, device=device)  # updates since the last change of the scale
        self._counts = False  # scale_loss has a shortcut that leaves the scaler alone

    def start(self) -> None:
        """Take over the scale of the host."""
        self.scale.fill_(self.scaler.loss_scale())
        self._clean.fill_(self.scaler._unskipped)

    @contextmanager
    def deciding(self, optimizer: Optimizer) -> Iterator[None]:
        """Context of a step of ``optimizer``."""
        self.found.zero_()
        self.scaler.replacement = self
        if self.scaler.dynamic:
            optimizer.found_inf = self.found  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.scaler.replacement = None
            if self.scaler.dynamic:
                del optimizer.found_inf  # type: ignore[attr-defined]

    def update(self) -> None:
        """Back off or grow as ``LossScaler.count`` does."""
        self._counts = True
        if not self.scaler.dynamic:
            return
        overflow = self.found != 0
        clean = (self._clean + 1).masked_fill(overflow, 0)
        grows = clean == WINDOW
        lower = torch.minimum(self.scale, (self.scale / FACTOR).clamp(min=self.scaler._min))
        higher = (self.scale * FACTOR).clamp(max=self.scaler._max)
        self.scale.copy_(torch.where(overflow, lower, torch.where(grows, higher, self.scale)))
        self._clean.copy_(clean.masked_fill(grows, 0))

    def count(self, overflow: bool) -> None:
        """Update the host's scale after a step with or without an ``overflow``."""
        if self._counts:
            self.scaler.count(overflow)
