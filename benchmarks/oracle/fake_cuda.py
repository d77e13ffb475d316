"""Makes CPU tensors pass for CUDA tensors, so that Python code that insists on CUDA runs on a CPU.

Only for the original Apex, which refuses every CPU tensor. Streams and events do nothing: on the CPU all work is done
when a call returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

_TYPES = {
    torch.float16: "HalfTensor",
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.int64: "LongTensor",
    torch.int32: "IntTensor",
    torch.uint8: "ByteTensor",
    torch.bool: "BoolTensor",
}
_FACTORIES = ["tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn"]
_FACTORIES += ["zeros_like", "ones_like", "empty_like", "full_like"]


class _Nothing:
    """A stream or an event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the CPU in place of every CUDA device among its arguments."""

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if isinstance(arg, torch.device) and _is_cuda(arg) else arg for arg in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return redirected


def _to(function: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.to`` and ``Module.to``, whose first argument may name a device."""

    @functools.wraps(function)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if isinstance(arg, str) and arg.startswith("cuda") else arg for arg in args)
        return _on_cpu(function)(self, *args, **kwargs)

    return to


def _tensor_type(dtype: torch.dtype) -> Callable[..., Tensor]:
    """A legacy constructor: ``torch.cuda.IntTensor([0])`` holds 0, ``torch.cuda.IntTensor(2)`` has two elements."""

    def make(*args: Any, device: Any = None) -> Tensor:
        sizes = all(isinstance(arg, int) for arg in args)
        return torch.empty(*args, dtype=dtype) if sizes else torch.tensor(args[0], dtype=dtype)

    return make


def install() -> None:
    """Change torch in this process, for good."""
    plain_type = Tensor.type

    def type_(self: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        return f"torch.cuda.{_TYPES[self.dtype]}" if dtype is None else plain_type(self, dtype, **kwargs)

    tensor: Any = Tensor
    tensor.type = type_
    tensor.is_cuda = property(lambda self: True)
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
    tensor.to = _to(Tensor.to)
    module: Any = nn.Module
    module.cuda = lambda self, *args, **kwargs: self
    module.to = _to(nn.Module.to)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    cuda: Any = torch.cuda
    for dtype, name in _TYPES.items():
        setattr(cuda, name, _tensor_type(dtype))
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = lambda *args: _Nothing()
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *args: (8, 0)
    cuda.stream = _no_stream
    for module, name in (
        (cuda, "synchronize"),
        (cuda, "set_device"),
        (cuda.nvtx, "range_push"),
        (cuda.nvtx, "range_pop"),
    ):
        setattr(module, name, lambda *args: None)


def _no_stream(stream: Any) -> AbstractContextManager[None]:
    return nullcontext()
