"""Apex's ``optimizers``, on torch's foreach and fused kernels, for CPU and CUDA.

Their base class is ``fused_optimizer.FusedOptimizer``: start reading there. LARC is in ``parallel``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.apex.optimizers.fused_adagrad import FusedAdagrad
from harness.apex.optimizers.fused_adam import FusedAdam
from harness.apex.optimizers.fused_lamb import FusedLAMB
from harness.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from harness.apex.optimizers.fused_novograd import FusedNovoGrad
from harness.apex.optimizers.fused_sgd import FusedSGD
from harness.apex.optimizers.multi_tensor import (
    multi_tensor_adagrad,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_novograd,
    multi_tensor_sgd,
)
from harness.apex.optimizers.multi_tensor_lamb import multi_tensor_l2norm, multi_tensor_lamb, multi_tensor_lamb_mp

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]


def __getattr__(name: str) -> Any:
    if name == "FP16_Optimizer":  # Apex had it here until 2019; loaded on demand, because it needs fp16_utils
        from harness.apex.optimizers.fp16_optimizer import FP16_Optimizer

        return FP16_Optimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Libraries look for the functions of amp_C in attributes, where Apex kept them. Attached here, since the functions use
# the formulas of the optimizers' modules.
_ATTRIBUTES: list[tuple[type, list[Callable[..., Any]]]] = [
    (FusedAdagrad, [multi_tensor_adagrad]),
    (FusedAdam, [multi_tensor_adam, multi_tensor_adam_capturable, multi_tensor_adam_capturable_master]),
    (FusedLAMB, [multi_tensor_l2norm, multi_tensor_lamb]),
    (FusedMixedPrecisionLamb, [multi_tensor_l2norm, multi_tensor_lamb_mp]),
    (FusedNovoGrad, [multi_tensor_novograd]),
    (FusedSGD, [multi_tensor_sgd]),
]
for _optimizer, _functions in _ATTRIBUTES:
    for _function in _functions:
        setattr(_optimizer, _function.__name__, staticmethod(_function))
