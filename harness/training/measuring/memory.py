"""The content of a rank's memory, what a CPU does with memory that is freed, and the error for a rank that runs out."""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from harness.config.constraints import conflicts
from harness.config.schema import Config
from harness.distributed import stack
from harness.errors import TrainingError, plural
from harness.training.model import recompute
from harness.training.optimizer import emulated_half
from harness.training.run import Run
from harness.training.strategies.base import strategy_class
from harness.training.strategies.sharding import local

GIB, MIB = 2**30, 2**20
_OUT = re.compile(r"out of memory|_STATUS_ALLOC_FAILED|can't allocate memory", re.I)  # of CUDA, its libraries, the CPU
_NUM_SETTINGS = 3  # to suggest
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_LARGEST_KEPT = 32 * 2**20  # the largest _MMAP_THRESHOLD that glibc takes


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU, make malloc keep freed blocks of up to 32 MiB for later use instead of returning them to the system.

    Every training step frees its activations. By default, glibc then returns most of them, and the kernel has to map
    and clear the same pages again in the next step. Settings of malloc in the environment take precedence.
    """
    is_configured = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if device.type == "cpu" and sys.platform == "linux" and not is_configured:
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if set_option is not None:
            set_option(_MMAP_THRESHOLD, _LARGEST_KEPT)
            set_option(_TRIM_THRESHOLD, -1)


def held(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer, average: Iterable[Tensor]) -> dict[str, int]:
    """Return the bytes on this rank between two steps of ``optimizer``, by what they are for. Gradients count as if all
    were present."""
    stepped = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    weights = {id(p): p for p in parameters} | stepped  # with masters
    state = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]
    return {
        "parameters": num_bytes(weights.values()),
        "gradients": num_bytes(stepped.values()),
        "optimizer state": num_bytes(state),
        "moving average": num_bytes(average),
    }


class KeptForBackward(saved_tensors_hooks):
    """Context that measures what a forward pass of ``num_rows`` rows keeps for its backward pass, in ``num_bytes``: the
    activations, but not ``others``, such as the parameters."""

    def __init__(self, num_rows: int, others: Iterable[Tensor]) -> None:
        super().__init__(self._pack, self._unpack)
        self.num_rows = num_rows
        self._others = {tensor.untyped_storage()._cdata for tensor in others}
        self._sizes: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._others:
            self._sizes[storage._cdata] = storage.nbytes()
        return tensor, tensor._version

    def _unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        tensor, version = packed
        if tensor._version != version:  # which autograd itself checks without hooks
            raise RuntimeError("a tensor that the backward pass needs has been modified by an inplace operation")
        return tensor


def kept_of_shapes(model: nn.Module, inputs: Tensor, num_rows: int) -> KeptForBackward:
    """Return what ``model`` keeps of ``num_rows`` rows like those of ``inputs``, from the shapes alone, without
    computing anything. Raises what the model raises for tensors without values. The model must not be used
    afterwards."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state: dict[str, Tensor] = {name: mode.from_tensor(each, static_shapes=True) for name, each in tensors.items()}
        saved = KeptForBackward(num_rows, state.values())
        rows = torch.zeros(num_rows, *inputs.shape[1:], dtype=inputs.dtype)
        with saved:
            functional_call(model.train(), state, (rows,))
    return saved


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(part.numel() * part.element_size() for part in (local(tensor.detach()) for tensor in tensors))


def out_of_memory_error(error: BaseException, run: Run | None) -> TrainingError | None:
    """Return the error for an allocation that failed, in ``run`` if it is built; None for any other error."""
    text = str(error)
    if not isinstance(error, RuntimeError) or isinstance(error, torch.distributed.DistError) or not _OUT.search(text):
        return None
    match = re.search(r"[Tt]ried to allocate ([\d.]+ (?:\w+))", text)
    free = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", text)
    problem = f"tried to allocate {match[1]}" if match else "an allocation failed"
    problem += f"; {free[2]} of {free[1]} is free" if free else ""
    if run is None:
        return TrainingError(
            f"out of memory while the run was being built: {problem} ({stack.raised_at(error)})",
            hint="check with nvidia-smi whether another process is using this device; or use a smaller model "
            "(model.args)",
        )
    when = "training" if run.module.training else "evaluation"
    has_blocks = bool(recompute.repeated_blocks(run.module))
    return TrainingError(
        f"out of memory on {run.runtime.device} during {when}: {problem}. Largest: {'; '.join(_largest(run, when))}",
        hint=remedies(run.config, run.runtime.world_size, when, has_blocks, run.runtime.device),
    )


def remedies(
    config: Config, world_size: int, when: str, has_blocks: bool, device: torch.device, most_rows: float = math.inf
) -> str:
    """Return settings that need less memory, in words. ``when``: "training" or "evaluation"; ``most_rows``: how many
    fit at a time, negative if the rest alone does not."""
    ways = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)} ({effect})"
        for key, value, effect in _settings(config, world_size, when, has_blocks, device, most_rows)
        if not any(conflicts(_with(config, key, value)))
    ]
    if most_rows >= 0 and hasattr(config.task, "image_size"):
        ways.append("a smaller task.image_size")
    shares = _rows(config, 2, when) < _rows(config, 1, when) and not strategy_class(config.parallel).one_process
    if world_size == 1 and shares and not config.batch.misfit(2):
        ways.append("more ranks, which share batch.global (harness launch --nproc 2)")
    ways += ["a smaller model (model.args)", "an optimizer with less state, such as sgd (optimizer.name)"]
    return f"use one of: {'; '.join(ways[:_NUM_SETTINGS])}"


def _largest(run: Run, when: str) -> Iterator[str]:
    """Yield the content of the memory, the largest part first."""
    parts = held(run.module.parameters(), run.optimizer, run.ema.average if run.ema else ())
    device, rows = run.runtime.device, _rows(run.config, run.runtime.world_size, when)
    activations = f"activations and temporary tensors, for {plural(rows, 'row')} at a time"
    if device.type == "cuda":
        parts[f"{activations},"] = max(0, torch.cuda.max_memory_allocated(device) - sum(parts.values()))
    else:
        yield f"{activations} (not measured on a CPU)"
    for name, size in sorted(parts.items(), key=lambda part: -part[1]):
        if size:
            yield f"{name} {shown(size)}"


def shown(size: float) -> str:
    """Return ``size``, in bytes, with a unit."""
    if size < MIB:
        return f"{size / 1024:.1f} KiB"
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"


def _rows(config: Config, world_size: int, when: str) -> int:
    """Return the rows per forward pass of a rank."""
    batch = config.batch
    micro = (batch.per_rank or (batch.global_ or 0) // config.parallel.num_ranks(world_size)) // batch.accumulate
    return batch.eval_per_rank or micro if when == "evaluation" else micro


def _settings(
    config: Config, world_size: int, when: str, has_blocks: bool, device: torch.device, most_rows: float
) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, effect) of settings that need less memory, those that change the training least first. Some
    may not fit the others."""
    batch, rows = config.batch, _rows(config, world_size, when)
    per_rank = rows * batch.accumulate
    if when == "evaluation" and rows > 1:
        yield "batch.eval_per_rank", rows // 2, "the same metrics"
    elif rows > 1 and most_rows >= 1:
        larger = range(batch.accumulate + 1, per_rank + 1)
        count = next(n for n in larger if per_rank % n == 0 and per_rank // n <= most_rows)
        yield "batch.accumulate", count, f"{plural(per_rank // count, 'row')} at a time; the same batch size"
    if when == "training" and not config.model.activation_checkpointing and has_blocks:
        yield "model.activation_checkpointing", True, "blocks run again in the backward pass; the same results"
    is_slow = emulated_half.warning(_with(config, "precision.opt_level", "O4").precision, device)
    if config.precision.opt_level == "O0" and rows / 2 <= most_rows and not is_slow:
        yield "precision.opt_level", "O4", "activations in bfloat16, half the size"
    if world_size > 1 and not strategy_class(config.parallel).shards_weights:
        yield "parallel.strategy", "fsdp", f"weights, gradients and optimizer state shared by {world_size} ranks"
    if config.train.ema_decay:
        yield "train.ema_decay", None, "no moving average"
    if when == "training" and rows > 1 and most_rows >= 1:
        micro_batches = batch.accumulate * (config.parallel.num_ranks(world_size) if batch.global_ else 1)
        name = "batch.global" if batch.global_ else "batch.per_rank"
        yield name, int(min(rows // 2, most_rows)) * micro_batches, "a smaller batch; optimizer.lr may need to change"


def _with(config: Config, key: str, value: Any) -> Config:
    section, _, name = key.partition(".")
    changed = getattr(config, section).model_copy(update={"global_" if name == "global" else name: value})
    return config.model_copy(update={section: changed})
