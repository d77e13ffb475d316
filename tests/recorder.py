"""A recorder of steps for a CPU, as strict as a CUDA graph: it repeats operations on fixed memory, and no Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Reading a value, and copying Python numbers to the device: torch.tensor()
_REFUSED = ("_local_scalar_dense", "item", "equal", "nonzero", "is_nonzero", "lift_fresh")


class OpRecorder:
    """Records the operations of a function with their tensors; ``replay`` does them again in the same memory.

    As while a CUDA graph is captured, recorded operations have no effect yet, reading a value fails, and Python that
    runs next to the operations runs only once. ``replays`` counts the calls, ``recorded`` the operations.
    """

    def __init__(self) -> None:
        self.replays = 0
        self.recorded: list[int] = []

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        stream = torch.get_rng_state()
        with _Tape() as tape:
            function()
        tape.undo()
        torch.set_rng_state(stream)
        self.recorded.append(len(tape.operations))

        @torch.no_grad()
        def replay() -> None:
            self.replays += 1
            for operation, args, kwargs, results in tape.operations:
                found = operation(*args, **kwargs)
                for old, new in zip(results, _tensors(found) if results else [], strict=True):
                    old.copy_(new)

        return replay

    def close(self) -> None:
        pass


class _Tape(TorchDispatchMode):
    """``operations``: (operation, arguments, the memory of new results) in their order, backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._own: dict[int, Tensor] = {}  # storages made by operations, kept so that none is used twice
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> a tensor of all of it, its first content

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        if func.name().removeprefix("aten::").split(".")[0] in _REFUSED:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.name()}")
        written = [place for place, argument in enumerate(schema.arguments) if _is_written(argument)]
        for place in written:
            argument = schema.arguments[place]
            if place < len(args) or argument.name in kwargs:
                for tensor in _tensors(args[place] if place < len(args) else kwargs[argument.name]):
                    self._keep(tensor)
        found = func(*args, **kwargs)
        is_new = all(result.alias_info is None for result in schema.returns)
        results = _tensors(found) if is_new else []
        for result in results:
            self._own[_place(result)] = result
        if is_new or written:  # a view of fixed memory stays what it is
            self.operations.append((func, args, kwargs, results))
        return found

    def _keep(self, tensor: Tensor) -> None:
        place = _place(tensor)
        if place not in self._own and place not in self._before:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self._before[place] = whole, whole.clone()

    def undo(self) -> None:
        """Take back what the recorded operations did to memory that was there before."""
        for whole, content in self._before.values():
            whole.copy_(content)


def _is_written(argument: Any) -> bool:
    """Batch norms do not declare that they write to their statistics."""
    return argument.name.startswith("running_") or (argument.alias_info is not None and argument.alias_info.is_write)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
