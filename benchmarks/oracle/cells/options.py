"""Levels and the arguments of ``amp.initialize``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.oracle.cells.kit import LEVELS, Result, adam, cells, convnet, fit, images, mlp, outcome, sgd, vectors

OPTIMIZERS = {"sgd": sgd, "adam": adam}


def _initialize(model: nn.Module, optimizer: Any, level: str, **options: Any) -> tuple[nn.Module, Any]:
    from apex import amp

    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


@cells("plain", level=LEVELS, optimizer=OPTIMIZERS)
def plain(level: str, optimizer: str) -> Result:
    net = convnet()
    return fit(*_initialize(net, OPTIMIZERS[optimizer](net.parameters()), level), images(10))


@cells("overflow", level=LEVELS, optimizer=OPTIMIZERS)
def overflow(level: str, optimizer: str) -> Result:
    net = convnet()
    pair = _initialize(net, OPTIMIZERS[optimizer](net.parameters()), level, loss_scale="dynamic")
    return fit(*pair, images(10), overflow=(2, 3, 7))


@cells("accumulate", level=LEVELS, optimizer=OPTIMIZERS, delay_unscale=(False, True))
def accumulate(level: str, optimizer: str, delay_unscale: bool) -> Result:
    net = convnet()
    model, made = _initialize(net, OPTIMIZERS[optimizer](net.parameters()), level)
    made.zero_grad()
    return fit(model, made, images(12), accumulate=3, delay_unscale=delay_unscale)


@cells("delay_unscale without a first zero_grad", level=LEVELS)
def accumulate_at_once(level: str) -> Result:
    net = convnet()
    return fit(*_initialize(net, sgd(net.parameters()), level), images(12), accumulate=3, delay_unscale=True)


@cells("accumulate and overflow", level=("O1", "O2"), delay_unscale=(False, True))
def accumulate_overflow(level: str, delay_unscale: bool) -> Result:
    net = convnet()
    pair = _initialize(net, sgd(net.parameters()), level)
    pair[1].zero_grad()
    return fit(*pair, images(12), accumulate=2, delay_unscale=delay_unscale, overflow=(5,))


@cells("loss_scale", level=LEVELS, loss_scale=(1.0, 128.0, "512.0", "dynamic"))
def loss_scale(level: str, loss_scale: Any) -> Result:
    net = convnet()
    return fit(*_initialize(net, sgd(net.parameters()), level, loss_scale=loss_scale), images(6))


@cells("static scale of 1 and accumulation", level=LEVELS)
def static_one(level: str) -> Result:
    net = convnet()
    return fit(*_initialize(net, sgd(net.parameters()), level, loss_scale=1.0), images(8), accumulate=2)


@cells("min_loss_scale", level=("O1", "O2"), minimum=(2.0**14, 2.0**15, None))
def minimum(level: str, minimum: float | None) -> Result:
    net = convnet()
    pair = _initialize(net, sgd(net.parameters()), level, min_loss_scale=minimum)
    return fit(*pair, images(10), overflow=(1, 2, 3, 4, 5))


@cells("max_loss_scale", level=("O1", "O2"), maximum=(2.0**10, 2.0**16, 2.0**24))
def maximum(level: str, maximum: float) -> Result:
    """Long enough for the scale to grow."""
    net = nn.Linear(4, 2)
    pair = _initialize(net, sgd(net.parameters(), lr=1e-3), level, max_loss_scale=maximum)
    batches = ((torch.full((2, 4), 0.5), torch.tensor([0, 1])) for _ in range(2003))
    return fit(*pair, batches, overflow=(1,))


@cells("overflow until the floor", level=("O1", "O2"))
def floor(level: str) -> Result:
    net = nn.Linear(16, 10)
    return fit(*_initialize(net, sgd(net.parameters()), level), vectors(22), overflow=range(19))


@cells("keep_batchnorm_fp32", level=("O0", "O2", "O3"), value=(True, False, "True", "False"))
def keep_batchnorm_fp32(level: str, value: Any) -> Result:
    net = convnet()
    return fit(*_initialize(net, sgd(net.parameters()), level, keep_batchnorm_fp32=value), images(6))


@cells("master_weights", level=("O0", "O2", "O3"), value=(True, False))
def master_weights(level: str, value: bool) -> Result:
    net = convnet()
    return fit(*_initialize(net, sgd(net.parameters()), level, master_weights=value), images(6))


@cells("cast_model_outputs", level=LEVELS, dtype=(torch.float16, torch.float32))
def cast_model_outputs(level: str, dtype: torch.dtype) -> Result:
    net = mlp()
    pair = _initialize(net, sgd(net.parameters()), level, cast_model_outputs=dtype)
    output = pair[0](next(vectors(1, seed=2))[0])
    return {"output": output.detach(), **fit(*pair, vectors(6), loss=_float_cross_entropy)}


@cells("cast_model_type=float32", level=("O0", "O1", "O2", "O3"))
def cast_model_type(level: str) -> Result:
    net = convnet()
    return fit(*_initialize(net, sgd(net.parameters()), level, cast_model_type=torch.float32), images(6))


@cells("cast_model_type=False", level=("O0", "O1", "O2", "O3"))
def cast_model_type_false(level: str) -> Result:
    net = convnet()
    return fit(*_initialize(net, sgd(net.parameters()), level, cast_model_type=False), images(6))


@cells("patch_torch_functions=False", level=LEVELS)
def patch_torch_functions(level: str) -> Result:
    net = convnet()
    return fit(*_initialize(net, sgd(net.parameters()), level, patch_torch_functions=False), images(6))


@cells("enabled=False", level=LEVELS)
def disabled(level: str) -> Result:
    from apex import amp

    net = convnet()
    optimizer = sgd(net.parameters())
    net, optimizer = amp.initialize(net, optimizer, enabled=False, opt_level=level, verbosity=0)
    for x, y in images(4):
        with amp.scale_loss(nn.functional.cross_entropy(net(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": [parameter.detach() for parameter in net.parameters()]}


@cells("loss_scale as text", level=LEVELS)
def strings(level: str) -> Result:
    """What ``argparse`` delivers: every option is text."""
    net = convnet()
    options = {} if level == "O1" else {"keep_batchnorm_fp32": "True"}
    pair = _initialize(net, sgd(net.parameters()), level, loss_scale="64", **options)
    return {**fit(*pair, images(4)), **outcome(*pair)}


def _float_cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), target)
