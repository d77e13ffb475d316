"""State of a training script that is in no optimizer: random streams, and tensors such as averages of the weights."""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

import resume_digest as digest
import torch
from torch import Tensor, nn


def streams() -> dict[str, Any]:
    """Digests of the global random streams."""
    found = {
        "torch": digest.tensor(torch.get_rng_state()),
        "random": digest.text(random.getstate()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = digest.text(keys.tobytes() + repr((name, *rest)).encode())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            found[f"cuda:{index}"] = digest.tensor(torch.cuda.get_rng_state(index))
    return found


def others(recorder: Any, *optimizers: Any) -> dict[str, Any]:
    """Digests of live tensors with the shape of a parameter that are neither parameters, gradients, optimizer state nor
    buffers of the model; and of random generators of the script's own."""
    parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    known = {id(each) for parameter in parameters for each in (parameter, parameter.grad)}
    for optimizer in optimizers:
        known |= {id(value) for state in optimizer.state.values() for value in _values(state)}
    for root in list(recorder.roots):
        known |= {id(each) for each in (*root.parameters(), *root.buffers())}
        known |= {id(each.grad) for each in root.parameters()}
    shapes = {tuple(each.shape) for each in parameters if each.numel() > 1}
    named: dict[int, str] = {}
    tensors: list[Tensor] = []
    found: dict[str, Any] = {}
    for each in gc.get_objects():
        kind = type(each)
        if issubclass(kind, nn.Module):
            if each not in recorder.roots:
                for key, value in (*each._parameters.items(), *each._buffers.items()):
                    if value is not None:
                        named.setdefault(id(value), f"{kind.__name__}.{key}")
        elif issubclass(kind, Tensor) and not str(kind.__module__).startswith("torch._"):  # not one of the compiler's
            if id(each) not in known and each.grad_fn is None and tuple(each.shape) in shapes:
                tensors.append(each)
        elif kind.__name__ == "Generator" and str(kind.__module__).startswith("numpy.random"):
            found[f"numpy.random.Generator {len(found)}"] = digest.text(each.bit_generator.state)
        elif kind is random.Random and each is not random._inst:  # type: ignore[attr-defined]
            found[f"random.Random {len(found)}"] = digest.text(each.getstate())
    groups: dict[str, list[Any]] = {}
    for value in tensors:
        if value.is_floating_point():
            label = named.get(id(value), f"a tensor {list(value.shape)}")
            groups.setdefault(label, []).append(digest.tensor(value))
    for label, digests in groups.items():
        found[label] = sorted(digest.resolve(digests))
    return found


def _values(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [item for value in state.values() for item in _values(value)]
    if isinstance(state, (list, tuple)):
        return [item for value in state for item in _values(value)]
    return [state]
