"""Compares four ways to implement O1 on one training step of two small models on the CPU.

    python benchmarks/apex_o1_engine.py [--repeats 30]

- autocast     torch.autocast alone: the lower bound, but not O1 on a CPU, where softmax, norms and sums stay reduced
- kernels      autocast plus kernels under its dispatch key where Apex's lists differ: what harness.apex does
- namespaces   autocast plus Python wrappers on torch, torch.nn.functional and torch.Tensor: what Apex does
- mode         a TorchFunctionMode that looks every function up in the lists

Prints processor time per step in milliseconds (forward, loss and backward), best of the repeats, and the ratio
to autocast.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from harness.apex import amp

DTYPE = torch.bfloat16
WRAPPED = ("softmax", "log_softmax", "layer_norm", "group_norm", "gelu", "softplus", "cross_entropy", "mse_loss")
METHODS = ("sum", "exp", "log", "pow", "norm", "softmax", "log_softmax", "var", "std", "prod", "cumsum", "rsqrt")


def to_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its reduced-precision tensor arguments in float32."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args = tuple(a.float() if isinstance(a, torch.Tensor) and a.dtype is DTYPE else a for a in args)
        return function(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def plain() -> Iterator[None]:
    with torch.autocast("cpu", dtype=DTYPE):
        yield


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    yield
    amp.reset()


@contextlib.contextmanager
def namespaces() -> Iterator[None]:
    targets = [(F, name) for name in WRAPPED] + [(torch.Tensor, name) for name in METHODS]
    targets += [(torch, name) for name in METHODS if hasattr(torch, name)]
    before = [(where, name, getattr(where, name)) for where, name in targets]
    for where, name, function in before:
        setattr(where, name, to_float32(function))
    with torch.autocast("cpu", dtype=DTYPE, cache_enabled=False):
        yield
    for where, name, function in before:
        setattr(where, name, function)


class Mode(TorchFunctionMode):
    """Looks every function up, also those in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = {getattr(F, name) for name in WRAPPED} | {getattr(torch.Tensor, name) for name in METHODS}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.listed:
            return to_float32(func)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def mode() -> Iterator[None]:
    with torch.autocast("cpu", dtype=DTYPE, cache_enabled=False), Mode():
        yield


def convolutional() -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = []
    for i in range(8):
        layers += [nn.Conv2d(32 if i else 3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 256, 10)), torch.randn(16, 3, 16, 16)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    # F.gelu by late lookup, else wrapping the namespace would miss it and have less to do
    layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, activation=lambda x: F.gelu(x), batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(32 * 128, 10)), torch.randn(8, 32, 128)


def step(way: Callable[[], contextlib.AbstractContextManager[None]], model: nn.Module, x: torch.Tensor) -> float:
    """Seconds of forward and loss inside ``way``, and of the backward pass outside, as in ``scale_loss``."""
    y = torch.zeros(len(x), dtype=torch.long)
    with way():
        F.cross_entropy(model(x), y)  # kernels are looked up once after they are registered: not a cost of a step
        start = time.process_time()
        loss = F.cross_entropy(model(x), y)
        forward_s = time.process_time() - start
    start = time.process_time()
    loss.backward()
    backward_s = time.process_time() - start
    for parameter in model.parameters():
        parameter.grad = None
    return forward_s + backward_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for make in (convolutional, transformer):
        torch.manual_seed(0)
        model, x = make()
        ways = {"autocast": plain, "kernels": kernels, "namespaces": namespaces, "mode": mode}
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(repeats):  # interleaved, so that a busy machine is unfair to all alike
            for name, way in ways.items():
                step(way, model, x)
                best[name] = min(best[name], step(way, model, x))
        for name, seconds in best.items():
            print(f"{make.__name__:14} {name:11} {seconds * 1e3:8.2f} ms  x{seconds / best['autocast']:.3f}")


if __name__ == "__main__":
    main()
