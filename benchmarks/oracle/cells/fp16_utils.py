"""``apex.fp16_utils``: master weights by hand, and ``FP16_Optimizer``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.oracle.cells.kit import Result, adam, cells, convnet, copy, cross_entropy, images, mlp, sgd

SCALES: dict[str, dict[str, Any]] = {
    "static 1": {},
    "static 128": {"static_loss_scale": 128.0},
    "dynamic": {"dynamic_loss_scale": True},
    "dynamic from 2**10": {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**10}},
    "dynamic with a window of 3": {
        "dynamic_loss_scale": True,
        "dynamic_loss_args": {"init_scale": 8.0, "scale_window": 3},
    },
}


def _train(
    net: nn.Module, optimizer: Any, batches: Any, overflow: Any = (), clip: float = 0.0, losses: int = 1
) -> Result:
    """Train with an ``FP16_Optimizer``; return all that is visible afterwards."""
    seen = []
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        for part in range(losses):
            loss = cross_entropy(net(x.half()).float(), y) / (part + 1)
            optimizer.backward(loss * 1e38 if step in overflow else loss, update_master_grads=part == losses - 1)
            seen.append(loss.detach())
        if clip:
            seen.append(torch.as_tensor(optimizer.clip_master_grads(clip)))
        optimizer.step()
        seen.append(torch.tensor(float(optimizer.loss_scale)))
    return {"seen": seen, **_outcome(net, optimizer)}


def _outcome(net: nn.Module, optimizer: Any) -> Result:
    inner = optimizer.optimizer
    masters = [parameter for group in inner.param_groups for parameter in group["params"]]
    return {
        "weights": [copy(parameter) for parameter in net.parameters()],
        "masters": [copy(parameter) for parameter in masters],
        "state": [{key: copy(value) for key, value in sorted(inner.state[p].items())} for p in masters],
        "overflow": bool(optimizer.overflow),
    }


def _start(scale: str, make: Any = sgd) -> tuple[nn.Module, Any]:
    from apex import fp16_utils

    net = fp16_utils.BN_convert_float(convnet().half())
    return net, fp16_utils.FP16_Optimizer(make(net.parameters()), verbose=False, **SCALES[scale])


@cells("FP16_Optimizer", scale=SCALES, make=("sgd", "adam"))
def fp16_optimizer(scale: str, make: str) -> Result:
    return _train(*_start(scale, {"sgd": sgd, "adam": adam}[make]), images(8))


@cells("FP16_Optimizer, overflow", scale=("dynamic", "dynamic with a window of 3"))
def fp16_optimizer_overflow(scale: str) -> Result:
    return _train(*_start(scale), images(8), overflow=(1, 2, 6))


@cells("FP16_Optimizer, clip_master_grads", scale=("static 128", "dynamic"))
def fp16_optimizer_clip(scale: str) -> Result:
    return _train(*_start(scale), images(6), clip=0.3)


@cells("FP16_Optimizer, two losses", scale=("static 1", "static 128", "dynamic"))
def fp16_optimizer_two_losses(scale: str) -> Result:
    return _train(*_start(scale), images(5), losses=2)


@cells("FP16_Optimizer, step(closure)", scale=("static 128", "dynamic"))
def fp16_optimizer_closure(scale: str) -> Result:
    net, optimizer = _start(scale)
    for x, y in images(5):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(net(x.half()).float(), y)
            optimizer.backward(loss)
            return loss

        optimizer.step(closure)
    return _outcome(net, optimizer)


@cells("FP16_Optimizer, resume", scale=("static 128", "dynamic"))
def fp16_optimizer_resume(scale: str) -> Result:
    net, optimizer = _start(scale)
    _train(net, optimizer, images(4))
    saved = {name: copy(value) for name, value in net.state_dict().items()}, optimizer.state_dict()
    net, optimizer = _start(scale)
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return _train(net, optimizer, images(4, seed=2))


@cells("FP16_Optimizer and LARC")
def fp16_optimizer_larc() -> Result:
    from apex.fp16_utils import FP16_Optimizer, network_to_half
    from apex.parallel.LARC import LARC

    net = network_to_half(mlp())
    inner = LARC(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), trust_coefficient=0.1)
    optimizer = FP16_Optimizer(inner, static_loss_scale=128.0, verbose=False)
    for x, y in _vectors(5):
        optimizer.zero_grad()
        optimizer.backward(cross_entropy(net(x).float(), y))
        optimizer.step()
    return {"weights": [copy(parameter) for parameter in net.parameters()]}


def _vectors(number: int) -> Any:
    from benchmarks.oracle.cells.kit import vectors

    return vectors(number)


@cells("masters by hand", flat=(False, True))
def by_hand(flat: bool) -> Result:
    """The loop of NVIDIA's examples of 2018: a static scale, masters in lists or in one flat parameter."""
    from apex import fp16_utils

    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)).half()
    model_params, masters = fp16_utils.prep_param_lists(net, flat_master=flat)
    optimizer = torch.optim.SGD(masters, lr=0.05, momentum=0.9)
    for x, y in _vectors(6):
        net.zero_grad()
        (cross_entropy(net(x.half()).float(), y) * 128.0).backward()
        fp16_utils.model_grads_to_master_grads(model_params, masters, flat_master=flat)
        for master in masters:
            master.grad.data.mul_(1 / 128.0)
        norm = fp16_utils.clip_grad_norm(masters, 1.0)
        optimizer.step()
        fp16_utils.master_params_to_model_params(model_params, masters, flat_master=flat)
    return {"masters": [copy(p) for p in masters], "model": [copy(p) for p in net.parameters()], "norm": copy(norm)}


@cells("conversion", function=("network_to_half", "convert_network", "BN_convert_float", "FP16Model", "tofp16"))
def conversion(function: str) -> Result:
    from apex import fp16_utils

    net, x = convnet(), next(images(1))[0]
    if function == "convert_network":
        net = fp16_utils.convert_network(net, torch.float16)
    elif function == "BN_convert_float":
        net = fp16_utils.BN_convert_float(net.half())
    elif function == "tofp16":
        return {"value": fp16_utils.tofp16()(x)}
    else:
        net = getattr(fp16_utils, function)(net)
    output = net(x if function in ("network_to_half", "FP16Model") else x.half())
    output.float().sum().backward()
    state = {name: copy(value) for name, value in net.state_dict().items()}
    return {"output": copy(output), "state": state, "gradients": [copy(p.grad) for p in net.parameters()]}


@cells("scaler of fp16_utils", scaler=("LossScaler", "DynamicLossScaler"))
def scalers(scaler: str) -> Result:
    from apex.fp16_utils import loss_scaler

    made = getattr(loss_scaler, scaler)(**({"scale": 128.0} if scaler == "LossScaler" else {"scale_window": 3}))
    scales = []
    for step in range(45):
        parameter = nn.Parameter(torch.ones(4))
        parameter.grad = torch.full((4,), float("inf") if step in (5, 20) or 22 < step < 26 else 1.0)
        overflow = made.has_overflow([parameter])
        made.update_scale(overflow)
        scales.append((bool(overflow), float(made.loss_scale)))
    parameter = nn.Parameter(torch.ones(4))
    made.backward(parameter.sum())
    return {"scales": scales, "gradient": copy(parameter.grad)}


@cells("to_python_float", of=("tensor", "list"))
def to_python_float(of: str) -> Result:
    from apex.fp16_utils import to_python_float

    return {"value": to_python_float(torch.tensor([1.5]) if of == "tensor" else [1.5])}
