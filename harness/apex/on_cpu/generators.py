"""CUDA's random generators: one per device index, separate from the CPU's, as under CUDA.

They serve the factory functions that name a CUDA device. All other random operations (dropout, ``x.normal_()``) draw
from the CPU generator, which seeding CUDA must not change once the script has seeded it: ranks that call
``torch.cuda.manual_seed(rank)`` still expect the same data order from the CPU generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from harness.apex.call_counter import is_called_by_torch
from harness.apex.local_rank import num_local_ranks
from harness.apex.on_cpu.placement import Device, place_of

_cpu_is_seeded = False  # whether the script has called torch.manual_seed


def functions() -> dict[str, Callable[..., Any]]:
    """Return the replacements by the name in torch.cuda."""

    def manual_seed(seed: int) -> None:
        _seed(seed, [place_of("cuda") or 0], by_torch=is_called_by_torch())

    def manual_seed_all(seed: int) -> None:
        _seed(seed, range(num_local_ranks()), by_torch=is_called_by_torch())

    return {
        "get_rng_state": lambda device="cuda": _generator_on(device).get_state(),
        "get_rng_state_all": lambda: [generator_of(index).get_state() for index in range(num_local_ranks())],
        "initial_seed": lambda: _generator_on("cuda").initial_seed(),
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "set_rng_state": lambda new_state, device="cuda": _set_state(_generator_on(device), new_state),
        "set_rng_state_all": _set_states,
    }


@functools.cache
def generator_of(index: int) -> torch.Generator:
    """Return the generator of the CUDA device ``index``."""
    generator = type(torch.default_generator)()
    generator.seed()
    return generator


def _generator_on(device: Device) -> torch.Generator:
    return generator_of(place_of(device) or 0)


def _seed(seed: int, indices: Iterable[int], by_torch: bool) -> None:
    global _cpu_is_seeded
    for index in indices:
        generator_of(index).manual_seed(int(seed))
    if by_torch:  # by torch.manual_seed
        _cpu_is_seeded = True
    elif not _cpu_is_seeded:  # so that a script that seeds only CUDA is reproducible
        torch.default_generator.manual_seed(int(seed))


def _set_states(states: list[Tensor]) -> None:
    for index, state in enumerate(states):
        _set_state(generator_of(index), state)


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    if state.numel() == generator.get_state().numel():  # ignores the state of a generator on a real GPU
        generator.set_state(state)
