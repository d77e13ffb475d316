"""Apex's ``optimizers``, on torch's foreach and fused kernels, for CPU and CUDA.

Their base class is ``fused_optimizer.FusedOptimizer``: start reading there. LARC is in ``parallel``.
"""

from __future__ import annotations

from typing import Any

from harness.apex.optimizers.fused_adagrad import FusedAdagrad
from harness.apex.optimizers.fused_adam import FusedAdam
from harness.apex.optimizers.fused_lamb import FusedLAMB
from harness.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from harness.apex.optimizers.fused_novograd import FusedNovoGrad
from harness.apex.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]


def __getattr__(name: str) -> Any:
    if name == "FP16_Optimizer":  # Apex had it here until 2019
        from harness.apex.fp16_utils import FP16_Optimizer

        return FP16_Optimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
