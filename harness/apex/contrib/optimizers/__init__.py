"""``apex.contrib.optimizers``: where Apex kept the fused optimizers of 2018 and 2019."""

from __future__ import annotations

from harness.apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from harness.apex.optimizers.fp16_optimizer import FP16_Optimizer

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]
