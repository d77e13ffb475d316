"""What ``torch.cuda`` answers on the CPU: one device per local rank, no memory in use, everything always done.

``rows`` is the list of what is replaced; its streams, events and devices are in ``streams``. Random numbers are the
CPU's: seeding "CUDA" seeds the CPU generator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from harness.apex.local_rank import num_local_ranks
from harness.apex.on_cpu.count import called_by_torch, note_call
from harness.apex.on_cpu.devices import Row
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

CAPABILITY = (8, 0)  # what scripts look for before they use float16 or bfloat16


def rows() -> Iterator[Row]:
    """(owner, attribute, replacement) of everything redirected here."""
    owners = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs)
    for name, replacement in _names().items():
        for owner in owners:
            if name in vars(owner):
                yield owner, name, replacement
    yield torch.cuda, "default_generators", (torch.default_generator,) * num_local_ranks()
    for module, names in (
        ("nvtx", "mark range_end range_pop range_push range_start"),
        ("profiler", "init start stop"),
    ):
        for name in names.split():
            if name in vars(owner := getattr(torch.cuda, module)):
                yield owner, name, _answers(f"torch.cuda.{module}.{name}", _zero)
    yield torch.cuda.nvtx, "range", _quiet_range
    yield torch.cuda.profiler, "profile", _quiet_range


def _names() -> dict[str, Any]:
    """{name in torch.cuda: what is there instead}"""
    answers: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(_NOTHING.split(), _none),
        **dict.fromkeys(_ZERO.split(), _zero),
        **dict.fromkeys(_EMPTY.split(), _empty),
        "current_device": current_device,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: "CPU, by harness.apex --device cpu",
        "get_device_properties": _properties,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * num_local_ranks(),
        "initial_seed": torch.initial_seed,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "mem_get_info": lambda device=None: (_host_bytes("SC_AVPHYS_PAGES"), _host_bytes("SC_PHYS_PAGES")),
        "memory_summary": lambda *args, **kwargs: "no CUDA memory: harness.apex --device cpu\n",
        "seed": lambda: None,
        "seed_all": lambda: None,
        "set_device": set_device,
        "set_rng_state": lambda new_state, device=None: _set_rng_state(new_state),
        "set_rng_state_all": lambda new_states: _set_rng_state(new_states[0]),
        "set_stream": set_stream,
    }
    return {
        **{name: _answers(f"torch.cuda.{name}", function) for name, function in answers.items()},
        "is_available": _tells_script("torch.cuda.is_available", lambda: True, False),
        "device_count": _tells_script("torch.cuda.device_count", num_local_ranks, 0),
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "device": DeviceContext,
        "device_of": DeviceContext,
    }


_NOTHING = """
    empty_cache init ipc_collect reset_accumulated_memory_stats reset_max_memory_allocated reset_max_memory_cached
    reset_peak_memory_stats set_per_process_memory_fraction synchronize
"""
_ZERO = """
    max_memory_allocated max_memory_cached max_memory_reserved memory_allocated memory_cached memory_reserved
    memory_usage utilization
"""
_EMPTY = "memory_stats memory_stats_as_nested_dict"


def _answers(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose calls from scripts are counted under ``name``."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        note_call(name)
        return function(*args, **kwargs)

    answer.__name__ = name.rpartition(".")[2]
    return answer


def _tells_script(name: str, value: Callable[[], Any], to_torch: Any) -> Callable[[], Any]:
    """Tells the script ``value()`` and torch's own code ``to_torch``, which would use CUDA where there is some."""

    def tell() -> Any:
        if called_by_torch():
            return to_torch
        note_call(name)
        return value()

    return tell


def _none(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _empty(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {}


def _host_bytes(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="CPU, by harness.apex --device cpu",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=_host_bytes("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count() or 1,
    )


def _seed(seed: int) -> None:
    # not torch.manual_seed, which seeds CUDA in its turn
    torch.default_generator.manual_seed(int(seed))


def _set_rng_state(state: Tensor) -> None:
    if state.numel() == torch.get_rng_state().numel():  # a state that a real CUDA generator saved means nothing here
        torch.set_rng_state(state)


@contextmanager
def _quiet_range(*args: Any, **kwargs: Any) -> Iterator[None]:
    note_call("torch.cuda.nvtx.range")
    yield
