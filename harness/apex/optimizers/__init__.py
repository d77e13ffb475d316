"""Apex's ``optimizers``, on torch's foreach and fused kernels, for CPU and CUDA.

Their base class is ``fused_optimizer.FusedOptimizer``: start reading there. LARC is in ``parallel``.
"""

from __future__ import annotations

from typing import Any

from harness.apex.optimizers import multi_tensor
from harness.apex.optimizers.fused_adagrad import FusedAdagrad
from harness.apex.optimizers.fused_adam import FusedAdam
from harness.apex.optimizers.fused_lamb import FusedLAMB
from harness.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from harness.apex.optimizers.fused_novograd import FusedNovoGrad
from harness.apex.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]


def __getattr__(name: str) -> Any:
    if name == "FP16_Optimizer":  # Apex had it here until 2019; loaded on demand, because it needs fp16_utils
        from harness.apex.optimizers.fp16_optimizer import FP16_Optimizer

        return FP16_Optimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Libraries look for the functions of amp_C in attributes, where Apex kept them. Attached here, since the functions use
# the formulas of the optimizers' modules.
_ATTRIBUTES = {
    FusedAdagrad: "adagrad",
    FusedAdam: "adam adam_capturable adam_capturable_master",
    FusedLAMB: "l2norm lamb",
    FusedMixedPrecisionLamb: "l2norm lamb_mp",
    FusedNovoGrad: "novograd",
    FusedSGD: "sgd",
}
for _optimizer, _names in _ATTRIBUTES.items():
    for _name in _names.split():
        setattr(_optimizer, f"multi_tensor_{_name}", staticmethod(getattr(multi_tensor, f"multi_tensor_{_name}")))
