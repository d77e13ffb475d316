"""The state of a model, a task or an optimizer that no state_dict holds: its plain attributes, as short text.

For ``harness verify-resume``, which compares them between an uninterrupted and a resumed run.
"""

from __future__ import annotations

import hashlib
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LIBRARIES = frozenset(
    ["torch", "torchvision", "numpy", "pandas", "pyarrow", "PIL", "scipy", "sklearn", "pydantic", "omegaconf", "timm",
     "transformers", "datasets", "fsspec", "filelock", "safetensors", "tqdm", "apex", "yaml"]
)  # fmt: skip
_DEPTH, _ITEMS, _HASHED_BYTES = 8, 200, 1 << 24
_OF_MODULES = frozenset(vars(nn.Module()))  # parameters, saved buffers, hooks
_OF_OPTIMIZERS = frozenset({"state", "param_groups", "defaults"})  # saved, or constant


def digest(roots: Mapping[str, Any]) -> dict[str, str]:
    """Return {"name.attribute (module.Class)": value} of everything that is reachable from ``roots`` and not in a
    state_dict.

    Large arrays are hashed. Objects of libraries are left out, apart from random generators: only modules, optimizers,
    containers and the user's own classes are searched.
    """
    found: dict[str, str] = {}
    seen: dict[int, Any] = {}
    for name, root in roots.items():
        found.update(_walk(name, root, seen, 0))
    return found


def _walk(name: str, value: Any, seen: dict[int, Any], depth: int) -> Iterator[tuple[str, str]]:
    if (text := _value(value)) is not None:
        yield name, text
        return
    if depth > _DEPTH or id(value) in seen:
        return
    seen[id(value)] = value  # kept, so that the id is not used again
    if isinstance(value, Mapping):
        for key, item in list(value.items())[:_ITEMS]:
            yield from _walk(f"{name}[{key!r}]", item, seen, depth + 1)
        yield f"{name} (length)", str(len(value))
    elif isinstance(value, list | tuple | deque):
        for index, item in enumerate(list(value)[:_ITEMS]):
            yield from _walk(f"{name}[{index}]", item, seen, depth + 1)
        yield f"{name} (length)", str(len(value))
    elif isinstance(value, nn.Module):
        yield from _module(name, value, seen, depth)
    elif isinstance(value, types.GeneratorType):
        for key, item in (value.gi_frame.f_locals if value.gi_frame else {}).items():
            yield from _walk(f"{name}<generator>.{key}", item, seen, depth + 1)
    elif _searched(value):
        yield from _members(name, value, vars(value), seen, depth)
        cls = type(value)
        if own(cls.__module__):
            yield from _members(cls.__name__, cls, _variables(cls), seen, depth)


def _module(name: str, module: nn.Module, seen: dict[int, Any], depth: int) -> Iterator[tuple[str, str]]:
    plain = {key: item for key, item in vars(module).items() if key not in _OF_MODULES}
    yield from _members(name, module, plain, seen, depth)
    for key in module._non_persistent_buffers_set:
        yield from _walk(f"{name}.{key}", module._buffers.get(key), seen, depth + 1)
    for key, child in module._modules.items():
        yield from _walk(f"{name}.{key}", child, seen, depth)  # a deep model is not a deep search
    if own(type(module).__module__):
        yield from _members(type(module).__name__, type(module), _variables(type(module)), seen, depth)


def _members(
    name: str, value: Any, members: Mapping[str, Any], seen: dict[int, Any], depth: int
) -> Iterator[tuple[str, str]]:
    cls = value if isinstance(value, type) else type(value)
    skipped = _OF_OPTIMIZERS if isinstance(value, torch.optim.Optimizer) else ()
    for key, item in list(members.items()):
        if key not in skipped:
            for place, text in _walk(f"{name}.{key}", item, seen, depth + 1):
                yield place if place.endswith(")") else f"{place} ({cls.__module__}.{cls.__qualname__})", text


def _variables(cls: type) -> dict[str, Any]:
    """Return the class attributes that a method could change."""
    return {
        key: item
        for key, item in vars(cls).items()
        if not key.startswith("__")
        and not callable(item)
        and not isinstance(item, property | classmethod | staticmethod)
    }


def _searched(value: Any) -> bool:
    return (
        hasattr(value, "__dict__")
        and (isinstance(value, torch.optim.Optimizer) or own(type(value).__module__))
        and not isinstance(value, type | types.ModuleType | types.FunctionType)
    )


def own(module: str) -> bool:
    """True for a module of the user's, and for one of the harness that a task or model consists of."""
    root = module.partition(".")[0]
    if root == "harness":
        return module.startswith(("harness.tasks", "harness.data", "harness.training.models"))
    return root not in sys.stdlib_module_names and root not in _LIBRARIES


def _value(value: Any) -> str | None:
    """The text of a value that holds no others; None for anything else."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:40]}... ({_hash(text.encode())})"
    if isinstance(value, Tensor):
        with torch.no_grad():
            bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return _array(bits.numpy(), tuple(value.shape))
    if isinstance(value, np.ndarray):
        return _array(value, value.shape) if value.dtype != object and value.flags.writeable else "array"
    if isinstance(value, np.generic):
        return repr(value)
    return _generator(value) or (f"{sorted(map(repr, value))[:_ITEMS]}" if isinstance(value, set | frozenset) else None)


def _array(value: np.ndarray, shape: tuple[int, ...]) -> str:
    flat = value.reshape(-1)
    if flat.nbytes > _HASHED_BYTES:
        flat = flat[:: -(-flat.nbytes // _HASHED_BYTES)]
    return f"array of {shape} ({_hash(np.ascontiguousarray(flat).tobytes())})"


def _generator(value: Any) -> str | None:
    """Return the state of a random generator, or of an iterator that shows its position."""
    if isinstance(value, random.Random):
        return f"random.Random at {_hash(repr(value.getstate()).encode())}"
    if isinstance(value, np.random.Generator):
        return f"numpy Generator at {_hash(repr(value.bit_generator.state).encode())}"
    if isinstance(value, np.random.RandomState):
        return f"numpy RandomState at {_hash(repr(value.get_state(legacy=False)).encode())}"
    if isinstance(value, torch.Generator):
        return f"torch.Generator at {_hash(value.get_state().numpy().tobytes())}"
    return repr(value) if type(value).__module__ == "itertools" and type(value).__name__ == "count" else None


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
