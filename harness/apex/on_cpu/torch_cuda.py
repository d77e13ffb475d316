"""Replaces ``torch.cuda``: one device per local rank, no memory in use, all work always done.

Streams, events and the current device are in ``streams``, random generators in ``generators``.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from harness.apex.call_counter import count_call, counted, is_called_by_torch
from harness.apex.local_rank import num_local_ranks
from harness.apex.on_cpu import generators
from harness.apex.on_cpu.streams import (
    DeviceContext,
    Event,
    Stream,
    StreamContext,
    current_device,
    current_stream,
    default_stream,
    set_device,
    set_stream,
)
from harness.apex.patches import Replacement

CAPABILITY = (8, 0)  # scripts check it before they use float16 or bfloat16
DEVICE_NAME = "CPU, by harness.apex --device cpu"

_RETURN_NONE = """
    empty_cache init ipc_collect reset_accumulated_memory_stats reset_max_memory_allocated reset_max_memory_cached
    reset_peak_memory_stats seed seed_all set_per_process_memory_fraction synchronize
"""
_RETURN_ZERO = """
    max_memory_allocated max_memory_cached max_memory_reserved memory_allocated memory_cached memory_reserved
    memory_usage utilization
"""


def replacements() -> Iterator[Replacement]:
    """Yield (owner, attribute, replacement) of everything that this module redirects."""
    owners = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs)
    for name, replacement in _by_name().items():
        for owner in owners:
            if name in vars(owner):
                yield owner, name, replacement
    yield torch.cuda, "default_generators", tuple(map(generators.generator_of, range(num_local_ranks())))
    nvtx = [(torch.cuda.nvtx, name) for name in ("mark", "range_end", "range_pop", "range_push", "range_start")]
    for owner, name in [*nvtx, *((torch.cuda.profiler, name) for name in ("init", "start", "stop"))]:
        if name in vars(owner):
            yield owner, name, counted(f"{owner.__name__}.{name}", lambda *args, **kwargs: 0)
    yield torch.cuda.nvtx, "range", _empty_range("nvtx.range")
    yield torch.cuda.profiler, "profile", _empty_range("profiler.profile")


def _by_name() -> dict[str, Any]:
    """Return the replacement of each name in torch.cuda."""
    functions: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(_RETURN_NONE.split(), lambda *args, **kwargs: None),
        **dict.fromkeys(_RETURN_ZERO.split(), lambda *args, **kwargs: 0),
        "memory_stats": lambda device=None: defaultdict(int),
        "memory_stats_as_nested_dict": lambda device=None: defaultdict(lambda: defaultdict(lambda: defaultdict(int))),
        **generators.functions(),
        "current_device": current_device,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: DEVICE_NAME,
        "get_device_properties": _properties,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "mem_get_info": lambda device=None: (_host_bytes("SC_AVPHYS_PAGES"), _host_bytes("SC_PHYS_PAGES")),
        "memory_summary": lambda *args, **kwargs: "no CUDA memory: harness.apex --device cpu\n",
        "set_device": set_device,
        "set_stream": set_stream,
    }
    return {
        **{name: counted(f"torch.cuda.{name}", function) for name, function in functions.items()},
        "is_available": _different_for_torch("torch.cuda.is_available", lambda: True, False),
        "device_count": _different_for_torch("torch.cuda.device_count", num_local_ranks, 0),
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "device": DeviceContext,
        "device_of": DeviceContext,
    }


def _different_for_torch(name: str, value: Callable[[], Any], for_torch: Any) -> Callable[[], Any]:
    """Return a function that returns ``value()`` to scripts and ``for_torch`` to torch, which would try to use CUDA."""

    def answer() -> Any:
        if is_called_by_torch():
            return for_torch
        count_call(name)
        return value()

    return answer


def _host_bytes(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=DEVICE_NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=_host_bytes("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count() or 1,
    )


def _empty_range(name: str) -> Callable[..., Any]:
    @contextmanager
    def empty(*args: Any, **kwargs: Any) -> Iterator[None]:
        count_call(f"torch.cuda.{name}")
        yield

    return empty
