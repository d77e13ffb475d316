"""State of a training script that is in no optimizer: random streams, and tensors such as averages of the weights; and
plain attributes of models, optimizers and the script's own objects, which no state_dict holds, as text.

``harness verify-resume`` compares them between an undisturbed and a resumed start.
"""

from __future__ import annotations

import dis
import functools
import gc
import hashlib
import itertools
import os
import random
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import resume_digest as digest
import torch
from resume_draws import is_users
from torch import Tensor, nn

_DEPTH, _ITEMS, _HASHED_BYTES = 8, 200, 1 << 24
_OF_MODULES = frozenset(vars(nn.Module()))  # parameters, saved buffers, hooks
_OF_OPTIMIZERS = frozenset({"state", "param_groups", "defaults"})  # saved, or constant
_GENERATORS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "random.Random": ("random.Random", lambda each: each.getstate()),
    "torch._C.Generator": ("torch.Generator", lambda each: each.get_state().tolist()),
    "numpy.random._generator.Generator": ("numpy.random.Generator", lambda each: each.bit_generator.state),
    "numpy.random.mtrand.RandomState": ("numpy.random.RandomState", lambda each: each.get_state(legacy=False)),
}
"""Classes of random generators: their public names, and what their next draws depend on."""


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


def others(recorder: Any, *optimizers: Any) -> dict[str, dict[str, Any]]:
    """Return {name: {"kind", "digests"}} of live tensors with the shape of a parameter that are neither parameters,
    gradients, optimizer state nor buffers of the model, of a "module" or "unnamed"; and of each random "generator" of
    the script's own, but for torch's: ``gc`` does not list them, ``attributes`` finds them by name."""
    parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    known = {id(each) for parameter in parameters for each in (parameter, parameter.grad)}
    for optimizer in optimizers:
        known |= {id(value) for state in optimizer.state.values() for value in _state_values(state)}
    for root in list(recorder.roots):
        known |= {id(each) for each in (*root.parameters(), *root.buffers())}
        known |= {id(each.grad) for each in root.parameters()}
    shapes = {tuple(each.shape) for each in parameters if each.numel() > 1}
    named: dict[int, str] = {}
    tensors: list[Tensor] = []
    found: dict[str, dict[str, Any]] = {}
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
        elif (text := _generator(each)) and not any(each is other for other in _global_generators()):
            label, _, place = text.partition(" at ")
            found[f"{label} {len(found)}"] = {"kind": "generator", "digests": [place]}
    for value in tensors:
        if value.is_floating_point():
            name = named.get(id(value))
            new: dict[str, Any] = {"kind": "module" if name else "unnamed", "digests": []}
            found.setdefault(name or f"a tensor {list(value.shape)}", new)["digests"].append(digest.tensor(value))
    for other in found.values():
        other["digests"] = sorted(digest.resolve(other["digests"]))
    return found


def _global_generators() -> list[Any]:
    numpy: Any = sys.modules.get("numpy.random.mtrand")
    return [random._inst, *([numpy._rand] if numpy else [])]  # type: ignore[attr-defined]


def _state_values(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [item for value in state.values() for item in _state_values(value)]
    if isinstance(state, (list, tuple)):
        return [item for value in state for item in _state_values(value)]
    return [state]


# Attributes


def attributes(modules: Sequence[nn.Module], optimizers: Sequence[Any]) -> dict[str, str]:
    """Return {"name.attribute (module.Class)": value} of everything that is reachable from models, optimizers, objects
    of the script's own classes and global variables of its files, and not in a state_dict.

    Large arrays are hashed. Objects of libraries are left out, apart from random generators: only modules, optimizers,
    containers and the user's own classes are searched.
    """
    roots: dict[str, Any] = {}
    numbers: Counter[str] = Counter()
    for each in (*modules, *optimizers, *_objects()):
        roots[_numbered(type(each).__name__, numbers)] = each
    for name, module in list(sys.modules.items()):  # libraries put objects there that are no modules and have no name
        if issubclass(type(module), types.ModuleType) and _is_users_module(name) and name != "__mp_main__":
            roots |= {f"{name}[{key!r}]": value for key, value in vars(module).items() if key[:2] != "__"}
    found: dict[str, str] = {}
    seen: dict[int, Any] = {}
    for name, root in roots.items():
        found.update(_walk(name, root, seen, 0))
    for name, value in (*_generators_of_loaders(), *_local_variables()):
        found.update(_walk(name, value, seen, 0))
    return found


def _numbered(name: str, numbers: Counter[str]) -> str:
    numbers[name] += 1
    return name + (f" {numbers[name]}" if numbers[name] > 1 else "")


def _generators_of_loaders() -> Iterator[tuple[str, Any]]:
    """Yield those of loaders and samplers, but for the harness's, which restores the order of rows by itself."""
    loads = torch.utils.data.DataLoader, torch.utils.data.Sampler
    numbers: Counter[str] = Counter()
    for each in gc.get_objects():
        if not issubclass(type(each), loads) or type(each).__module__.startswith("harness."):
            continue
        if (generator := vars(each).get("generator")) is not None:
            yield f"{_numbered(type(each).__name__, numbers)}.generator", generator


def _local_variables() -> Iterator[tuple[str, Any]]:
    """Yield (name (file:line), value) of random generators in variables of the functions and the script that train, and
    of tensors in those of functions. The line is that of the first assignment."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = os.path.realpath(frame.f_code.co_filename)
        kinds = () if frame.f_code.co_name == "<module>" else (Tensor,)
        if is_users(file):
            for name, value in [*frame.f_locals.items()]:
                if issubclass(type(value), (*kinds, itertools.count)) or _generator(value):
                    yield f"{name} ({os.path.basename(file)}:{_first_line(frame.f_code, name)})", value
        frame = frame.f_back


def _first_line(code: types.CodeType, variable: str) -> int:
    """Return the line that first assigns a variable of a function; the function's own for an argument."""
    line, lines = code.co_firstlineno, dict(dis.findlinestarts(code))
    for each in dis.get_instructions(code):
        line = lines.get(each.offset) or line
        # From Python 3.13 on, an instruction stores two variables, or stores one and then loads another.
        names = each.argval[: each.opname.count("STORE")] if isinstance(each.argval, tuple) else (each.argval,)
        if variable in names and each.opname.startswith("STORE"):
            return line
    return code.co_firstlineno


def _objects() -> list[Any]:
    """Return the objects of the script's own classes, oldest first. ``isinstance`` would run code of objects that stand
    in for others, such as those that warn of an old name."""
    left_out = (type, types.ModuleType, BaseException)
    return [each for each in gc.get_objects() if not issubclass(type(each), left_out) and _own(type(each))]


def _walk(name: str, value: Any, seen: dict[int, Any], depth: int) -> Iterator[tuple[str, str]]:
    if (text := _value(value)) is not None:
        yield name, text
        return
    if depth > _DEPTH or id(value) in seen:
        return
    seen[id(value)] = value  # kept, so that the id is not used again
    if isinstance(value, Mapping):
        try:
            items = list(value.items())
        except Exception:  # of a library's class, which may import what is missing
            return
        for key, item in items[:_ITEMS]:
            yield from _walk(f"{name}[{key!r}]", item, seen, depth + 1)
        yield f"{name} (length)", str(len(items))
    elif isinstance(value, (list, tuple, deque)):
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
        if _own(cls):
            yield from _members(cls.__name__, cls, _variables(cls), seen, depth)


def _module(name: str, module: nn.Module, seen: dict[int, Any], depth: int) -> Iterator[tuple[str, str]]:
    plain = {key: item for key, item in vars(module).items() if key not in _OF_MODULES}
    yield from _members(name, module, plain, seen, depth)
    for key in module._non_persistent_buffers_set:
        yield from _walk(f"{name}.{key}", module._buffers.get(key), seen, depth + 1)
    for key, child in module._modules.items():
        yield from _walk(f"{name}.{key}", child, seen, depth)  # a deep model is not a deep search
    if _own(type(module)):
        yield from _members(type(module).__name__, type(module), _variables(type(module)), seen, depth)


def _members(
    name: str, value: Any, members: Mapping[str, Any], seen: dict[int, Any], depth: int
) -> Iterator[tuple[str, str]]:
    cls = value if isinstance(value, type) else type(value)
    skipped = _OF_OPTIMIZERS if isinstance(value, torch.optim.Optimizer) else ()
    of_torch = cls.__module__.partition(".")[0] == "torch" or (skipped and not _own(cls))
    for key, item in list(members.items()):
        if key not in skipped and not (key.startswith("_") and of_torch):  # flags of torch's own
            for place, text in _walk(f"{name}.{key}", item, seen, depth + 1):
                yield place if place.endswith(")") else f"{place} ({cls.__module__}.{cls.__qualname__})", text


def _variables(cls: type) -> dict[str, Any]:
    """Return the class attributes that a method could change."""
    return {
        key: item
        for key, item in vars(cls).items()
        if not key.startswith("__")
        and not callable(item)
        and not isinstance(item, (property, classmethod, staticmethod))
    }


def _searched(value: Any) -> bool:
    return (
        hasattr(value, "__dict__")
        and (isinstance(value, torch.optim.Optimizer) or _own(type(value)))
        and not isinstance(value, (type, types.ModuleType, types.FunctionType))
    )


def _own(cls: type) -> bool:
    """Return True for a class in a file of the user's."""
    return _is_users_module(str(cls.__module__))


@functools.cache
def _is_users_module(name: str) -> bool:
    return is_users(os.path.realpath(getattr(sys.modules.get(name), "__file__", None) or ""))


def _value(value: Any) -> str | None:
    """Return the text of a value that holds no others; None for anything else."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:40]}... ({_hash(text.encode())})"
    if isinstance(value, Tensor):
        if value.grad_fn is not None:  # a result of this step, such as the loss
            return "result"
        return f"array of {tuple(value.shape)} ({digest.resolve(digest.tensor(value))})"
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _array(value) if value.dtype != object and value.flags.writeable else "array"
    if numpy is not None and isinstance(value, numpy.generic):
        return repr(value)
    if isinstance(value, itertools.count):
        return repr(value)
    return _generator(value) or (
        f"{sorted(map(repr, value))[:_ITEMS]}" if isinstance(value, (set, frozenset)) else None
    )


def _array(value: Any) -> str:
    flat = value.reshape(-1)
    if flat.nbytes > _HASHED_BYTES:
        flat = flat[:: -(-flat.nbytes // _HASHED_BYTES)]
    return f"array of {value.shape} ({_hash(flat.tobytes())})"


def _generator(value: Any) -> str | None:
    """Return the kind of a random generator and a digest of its state; None for anything else."""
    kind = _GENERATORS.get(f"{type(value).__module__}.{type(value).__name__}")
    return f"{kind[0]} at {_hash(repr(kind[1](value)).encode())}" if kind else None


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
