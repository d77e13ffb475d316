"""What training scripts build on CUDA: pinned loaders, autocast and its scaler, parallel wrappers, NCCL.

``rows`` is the list of what is replaced. Where gloo has no counterpart (``ReduceOp.AVG``) torch's own error is raised.
"""

from __future__ import annotations

import atexit
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import autocast_mode, grad_scaler
from torch.utils.data import DataLoader

from harness.apex.on_cpu.count import note
from harness.apex.on_cpu.devices import Row, names_cuda


def rows() -> Iterator[Row]:
    """(owner, attribute, replacement) of everything redirected here."""
    yield DataLoader, "__init__", _unpinned(DataLoader.__init__)
    yield from _autocast_rows()
    yield nn.DataParallel, "__init__", _data_parallel(nn.DataParallel.__init__)
    yield nn.parallel, "data_parallel", _functional_data_parallel
    if dist.is_available():
        distributed = nn.parallel.DistributedDataParallel
        yield distributed, "__init__", _distributed(distributed.__init__)
        for name, wrap in (
            ("init_process_group", _init_process_group),
            ("new_group", _new_group),
            ("barrier", _barrier),
            ("destroy_process_group", _destroy_process_group),
        ):
            replacement = wrap(getattr(dist, name))
            yield dist, name, replacement
            yield dist.distributed_c10d, name, replacement


def _unpinned(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.pin_memory:
            note("DataLoader(pin_memory=True)")
            self.pin_memory, self.pin_memory_device = False, ""

    return __init__


# Autocast


def _autocast_rows() -> Iterator[Row]:
    default = torch.get_autocast_dtype("cuda")
    host: dict[str, Callable[..., Any]] = {
        name: getattr(torch, name) for name in ("is_autocast_enabled", "get_autocast_dtype")
    }
    yield autocast_mode.autocast, "__init__", _autocast(autocast_mode.autocast.__init__, default)
    yield autocast_mode, "_cast", _cast(autocast_mode._cast)
    yield grad_scaler.GradScaler, "__init__", _grad_scaler(grad_scaler.GradScaler.__init__)
    for name, function in host.items():
        yield torch, name, _asks_of_autocast(function)
    yield torch, "get_autocast_gpu_dtype", lambda: host["get_autocast_dtype"]("cpu")


def _autocast(original: Any, default: torch.dtype) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if names_cuda(device_type):
            note("torch.autocast(cuda)")
            device_type, dtype = "cpu", dtype if dtype is not None else default
        original(self, device_type, dtype, *args, **kwargs)

    return __init__


def _asks_of_autocast(original: Callable[..., Any]) -> Callable[..., Any]:
    """Without an argument these two speak of CUDA."""

    @functools.wraps(original)
    def ask(device_type: str = "cuda") -> Any:
        return original("cpu" if names_cuda(device_type) else device_type)

    return ask


def _cast(original: Any) -> Any:
    """How ``torch.amp.custom_fwd(cast_inputs=)`` casts arguments on a device type."""

    @functools.wraps(original)
    def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return original(value, "cpu" if names_cuda(device_type) else device_type, dtype)

    return cast


def _grad_scaler(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        if names_cuda(device):
            note("torch.amp.GradScaler(cuda)")
            device = "cpu"
        original(self, device, *args, **kwargs)

    return __init__


# Parallel wrappers and process groups


def _data_parallel(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        note("DataParallel")
        nn.Module.__init__(self)
        self.module, self.device_ids = module, []  # what torch makes of it where it finds no device: pass through

    return __init__


def _functional_data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Any = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: Any = None,
) -> Any:
    note("data_parallel")
    return module(*(inputs if isinstance(inputs, tuple) else (inputs,)), **(module_kwargs or {}))


def _distributed(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(
        self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_ids is not None or output_device is not None:
            note("DistributedDataParallel(device_ids=)")
        original(self, module, None, None, *args, **kwargs)

    return __init__


def _init_process_group(original: Any) -> Any:
    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if names_cuda(kwargs.get("device_id")):
            del kwargs["device_id"]
        if not _is_nccl(backend):
            return original(backend, *args, **kwargs)
        note("init_process_group(nccl)")
        kwargs.pop("pg_options", None)  # NCCL's
        # NCCL lets a script end with its group open, as most do; gloo may abort then
        atexit.unregister(_close_group)
        atexit.register(_close_group)
        return original("gloo", *args, **kwargs)

    return init_process_group


def _close_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _new_group(original: Any) -> Any:
    @functools.wraps(original)
    def new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if names_cuda(kwargs.get("device_id")):
            del kwargs["device_id"]
        if _is_nccl(backend):
            note("new_group(nccl)")
            backend, args = "gloo", ()
            kwargs.pop("pg_options", None)
        return original(ranks, timeout, backend, *args, **kwargs)

    return new_group


def _destroy_process_group(original: Any) -> Any:
    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        gc.collect()  # what holds the group in circles lets go of it: gloo aborts if its threads outlive it
        original(group)

    return destroy_process_group


def _barrier(original: Any) -> Any:
    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        if device_ids is not None:
            note("barrier(device_ids=)")
        return original(group, async_op)

    return barrier


def _is_nccl(backend: str | None) -> bool:
    return backend is not None and "nccl" in backend.lower()
