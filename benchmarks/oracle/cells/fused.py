"""The optimizers of ``apex.optimizers``.

The original's need compiled kernels; those of ``harness.apex.amp_C`` stand in. So these cells compare everything around
the kernels: groups, state, masters, loss scaling, skipped steps.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.oracle.cells.kit import LEVELS, Result, cells, fit, mlp, vectors

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "FusedAdam": {"lr": 1e-3, "weight_decay": 1e-2},
    "FusedAdam without adam_w_mode": {"lr": 1e-3, "weight_decay": 1e-2, "adam_w_mode": False, "bias_correction": False},
    "FusedSGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4},
    "FusedSGD with nesterov": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "FusedSGD without momentum": {"lr": 0.05},
    "FusedLAMB": {"lr": 1e-2, "weight_decay": 1e-2},
    "FusedNovoGrad": {"lr": 1e-3, "weight_decay": 1e-2},
    "FusedAdagrad": {"lr": 1e-2, "weight_decay": 1e-2},
}


def _start(optimizer: str, level: str, **options: Any) -> tuple[nn.Module, Any]:
    from apex import amp, optimizers

    net = mlp()
    made = getattr(optimizers, optimizer.split()[0])(net.parameters(), **OPTIMIZERS[optimizer])
    return amp.initialize(net, made, opt_level=level, verbosity=0, **options)


@cells("fused", kernels=True, optimizer=OPTIMIZERS, level=LEVELS)
def fused(optimizer: str, level: str) -> Result:
    return fit(*_start(optimizer, level, loss_scale="dynamic"), vectors(8), overflow=(2,))


@cells("fused, accumulating", kernels=True, optimizer=("FusedAdam", "FusedSGD", "FusedLAMB"), level=("O1", "O2"))
def accumulating(optimizer: str, level: str) -> Result:
    return fit(*_start(optimizer, level), vectors(8), accumulate=2)


@cells("unscaling kernels", kernels=True, level=LEVELS, accumulate=(1, 2))
def kernels(level: str, accumulate: int) -> Result:
    """A plain torch optimizer, with ``multi_tensor_scale`` and ``multi_tensor_axpby`` in place of the fallback."""
    from apex import amp

    from benchmarks.oracle.cells.kit import convnet, images, sgd

    net = convnet()
    pair = amp.initialize(net, sgd(net.parameters()), opt_level=level, loss_scale="dynamic", verbosity=0)
    return fit(*pair, images(8), accumulate=accumulate, overflow=(3,))
