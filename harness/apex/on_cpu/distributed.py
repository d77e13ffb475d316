"""Replaces NCCL by gloo, and makes the parallel wrappers of torch ignore device ids.

Where gloo has no counterpart (``ReduceOp.AVG``), torch raises its own error.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from harness.apex.call_counter import count
from harness.apex.on_cpu.placement import move_all, names_cuda
from harness.apex.parallel.batch_norm_over_ranks import global_statistics, normalize, update_running_statistics
from harness.apex.patches import Replacement, around


def replacements() -> Iterator[Replacement]:
    """Yield (owner, attribute, replacement) of everything that this module redirects."""
    yield nn.DataParallel, "__init__", around(nn.DataParallel.__init__, _data_parallel)
    yield nn.parallel, "data_parallel", _functional_data_parallel
    if dist.is_available():
        distributed = nn.parallel.DistributedDataParallel
        yield distributed, "__init__", around(distributed.__init__, _distributed)
        yield nn.SyncBatchNorm, "forward", _sync_batchnorm_forward
        # torch's wrapper refuses SyncBatchNorm on the CPU, which works with the forward above
        yield distributed, "_passing_sync_batchnorm_handle", lambda self, module: None
        for name, function in (
            ("init_process_group", _init_process_group),
            ("new_group", _new_group),
            ("barrier", _barrier),
            ("destroy_process_group", _destroy_process_group),
        ):
            replacement = around(getattr(dist, name), function)
            yield dist, name, replacement
            yield dist.distributed_c10d, name, replacement


def _data_parallel(original: Any, self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    count("DataParallel")
    nn.Module.__init__(self)
    # the state in which torch leaves the wrapper when it finds no device: forward calls the module
    self.module, self.device_ids = module, []
    _move_inputs(self)


def _functional_data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Any = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: Any = None,
) -> Any:
    count("data_parallel")
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    return module(*move_all(inputs), **move_all(module_kwargs or {}))


def _move_inputs(wrapper: nn.Module) -> None:
    """Have ``wrapper`` move its inputs to CUDA, as torch's parallel wrappers do: the model may change them in place."""
    wrapper.register_forward_pre_hook(lambda _, args, kwargs: (move_all(args), move_all(kwargs)), with_kwargs=True)


def _distributed(
    original: Any,
    self: Any,
    module: nn.Module,
    device_ids: Any = None,
    output_device: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    if device_ids is not None or output_device is not None:
        count("DistributedDataParallel(device_ids=)")
    original(self, module, None, None, *args, **kwargs)
    if device_ids is not None:
        _move_inputs(self)


def _sync_batchnorm_forward(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    """Do the forward pass of ``nn.SyncBatchNorm``, which refuses CPU tensors, with the arithmetic of ``parallel``."""
    if not (self.training and dist.is_initialized() and dist.get_world_size(self.process_group) > 1):
        return _BatchNorm.forward(self, input)
    count("SyncBatchNorm")
    self._check_input_dim(input)
    mean, var, total = global_statistics(input.detach(), self.process_group)
    if self.track_running_stats:
        update_running_statistics(self, mean, var, total)
    return normalize(input, self.weight, self.bias, mean, var, total, self.eps, self.process_group)


def _init_process_group(original: Any, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
    if names_cuda(kwargs.get("device_id")):
        del kwargs["device_id"]
    if not _is_nccl(backend):
        return original(backend, *args, **kwargs)
    count("init_process_group(nccl)")
    kwargs.pop("pg_options", None)  # options of NCCL
    # Most scripts end with the group open. NCCL allows that; gloo may abort the process.
    atexit.unregister(_close_group)
    atexit.register(_close_group)
    return original("gloo", *args, **kwargs)


def _close_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _new_group(
    original: Any, ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any
) -> Any:
    if names_cuda(kwargs.get("device_id")):
        del kwargs["device_id"]
    if _is_nccl(backend):
        count("new_group(nccl)")
        backend, args = "gloo", (None, *args[1:]) if args else ()  # without pg_options, which are NCCL's
        kwargs.pop("pg_options", None)
    return original(ranks, timeout, backend, *args, **kwargs)


def _destroy_process_group(original: Any, group: Any = None) -> None:
    gc.collect()  # frees reference cycles that hold the group: gloo aborts if its threads outlive it
    original(group)


def _barrier(original: Any, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    if device_ids is not None:
        count("barrier(device_ids=)")
    return original(group, async_op)


def _is_nccl(backend: str | None) -> bool:
    return backend is not None and "nccl" in backend.lower()
