"""The ranks that a recipe speaks of, and the process that computes them.

Without ``parallel.logical_ranks``, each process is one rank. With it, the recipe has N logical ranks, and each of up to
N processes computes a block of them, one after the other. What belongs to a rank, its random streams and the buffers of
the model, is switched with it. Sums over ranks are then those of one fixed tree (``TreeSum``), so that no result
depends on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.apex.parallel.buckets import strides_in_buffer
from harness.distributed.runtime import Runtime
from harness.errors import TrainingError, plural
from harness.training.reproducibility import rng
from harness.training.reproducibility.tree_sum import Node, TreeSum, block, merge_into

_ALIGNMENT = 64  # bytes: kernels may take another path for other offsets


def describe(num: int, num_processes: int, gradient_bytes: int) -> str:
    """Return what ``num`` logical ranks cost on ``num_processes``, in words."""
    most = -(-num // num_processes)
    sums = max(_most_sums(num, process, num_processes) for process in range(num_processes))
    passes = f"{most} passes per step in each" if num % num_processes == 0 else f"up to {most} passes per step in each"
    if num_processes == num:
        passes = "one pass per step in each"
    memory = f"{plural(sums, 'sum')} of the gradients, {gradient_bytes / 2**20:.1f} MiB each"
    return f"on 1 to {num} processes; on {num_processes}: {passes}, {memory}"


def _most_sums(num: int, process: int, num_processes: int) -> int:
    """Return the largest number of sums that ``process`` keeps at a time."""
    nodes: list[Node[None]] = []
    most = 0
    for leaf in block(num, process, num_processes):
        most = max(most, len(nodes) + 1)
        merge_into(nodes, Node(0, leaf, None), num, lambda left, right: None)
    return most


class LogicalRanks:
    """The ranks of the recipe. ``own`` are those of this process, of which ``active`` has its streams and buffers in
    place; between two steps, that is the first."""

    def __init__(self, runtime: Runtime, num: int | None = None) -> None:
        """``num``: parallel.logical_ranks."""
        self.runtime, self.fixed = runtime, num is not None
        self.num = num or runtime.world_size
        self.own = block(self.num, runtime.rank, runtime.world_size)
        self.active = self.own.start
        self._devices: Sequence[torch.device] = ()
        self._places: dict[str, tuple[nn.Module, str]] = {}  # of the buffers in the model
        self._others: dict[int, _Owned] = {}  # of the ranks that are not active
        self._spare: dict[str, Tensor] = {}  # memory for the buffers of the rank that is active

    @property
    def most(self) -> int:
        """The largest number of ranks of any process."""
        return -(-self.num // self.runtime.world_size)

    def start(self, module: nn.Module, devices: Sequence[torch.device], *key: int) -> None:
        """Give each rank streams of its own, seeded from ``key`` and its number, and its own copy of the buffers of
        ``module``, which computes on ``devices``."""
        self._devices = devices
        # Integers are equal on all ranks, but for those that a model counts itself: they are not worth the space.
        names = [name for name, buffer in module.named_buffers() if self.fixed or buffer.is_floating_point()]
        parts = [(name, *name.rpartition(".")[::2]) for name in names]
        self._places = {name: (module.get_submodule(owner), key) for name, owner, key in parts}
        for rank in reversed(self.own):
            rng.seed_all(*key, rank)
            self._others[rank] = self._of_active()
        self.active = self.own.start
        self._spare = self._others.pop(self.active).buffers

    def activate(self, rank: int) -> None:
        """Let this process compute as ``rank`` from now on, with its streams and buffers."""
        if rank != self.active:
            now, spare = self._buffers, self._spare
            fits = {name for name, b in now.items() if name in spare and spare[name].shape == b.shape}
            spare = {name: spare[name] if name in fits else torch.empty_like(b) for name, b in now.items()}
            _assign(spare, now)
            self._others[self.active] = _Owned(rng.get_state(*self._devices), spare)
            owned = self._others.pop(rank)
            self._restore(owned)
            self.active, self._spare = rank, owned.buffers

    def state(self) -> list[dict[str, Any]]:
        """Return what each of this process's ranks owns: its random streams and, if there are several ranks, buffers.
        Loads with ``weights_only=True``."""
        return [
            {
                "rng": state.rng.plain(),
                "buffers": {name: buffer.clone() for name, buffer in state.buffers.items()},
            }
            for state in (self._of_active() if rank == self.active else self._others[rank] for rank in self.own)
        ]

    def load_state(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Restore the ``state`` of all ranks, in order."""
        for rank in reversed(self.own):
            self._restore(_Owned(rng.Streams.from_plain(ranks[rank]["rng"]), ranks[rank]["buffers"]))
            self._others[rank] = self._of_active()
        self.active = self.own.start
        self._spare = self._others.pop(self.active).buffers

    def average_buffers(self) -> None:
        """Set the running statistics of batch norms, and other floating-point buffers, which training leaves to each
        rank, to their mean over ranks, on all of them. Collective."""
        if self.num == 1 or not self._places:
            return
        float_buffers = [
            {name: b for name, b in buffers.items() if b.is_floating_point()} for buffers in self.buffers()
        ]
        kinds = [{(name, tuple(b.shape)) for name, b in buffers.items()} for buffers in float_buffers]
        names = sorted(name for name, _ in set.intersection(*self.runtime.gather(set.intersection(*kinds))))
        sorted_buffers = [[buffers[name] for name in names] for buffers in float_buffers]
        if not names:
            return
        flat = [torch.cat([buffer.double().reshape(-1) for buffer in buffers]) for buffers in sorted_buffers]
        means = (self.sum(flat) / self.num).split([buffer.numel() for buffer in sorted_buffers[0]])
        for buffers in sorted_buffers:
            for buffer, mean in zip(buffers, means, strict=True):
                buffer.copy_(mean.view_as(buffer))

    def set_buffers(self, values: dict[str, Tensor]) -> None:
        """Give all ranks of this process the buffers ``values``."""
        for buffers in self.buffers():
            _assign(buffers, values)

    def buffers(self) -> list[dict[str, Tensor]]:
        """Return the buffers of each of this process's ranks."""
        return [self._buffers if rank == self.active else self._others[rank].buffers for rank in self.own]

    def sum(self, parts: Sequence[Tensor], on_host: bool = False) -> Tensor:
        """Return the sum over all ranks of ``parts``, one flat tensor of each of this process's ranks, which it may
        overwrite. ``on_host``: they are on the CPU. Collective."""
        if not self.fixed:
            return self.runtime.sum_on_host(parts[0]) if on_host else self.runtime.sum(parts[0])
        tree = self.tree(on_host)
        for part in parts:
            tree.add(part)
        return tree.total()

    def tree(self, on_host: bool = False, merge: Callable[[Any, Any], Any] = Tensor.add_) -> TreeSum:
        group = self.runtime.group if on_host else None
        return TreeSum(self.num, self.runtime.rank, self.runtime.world_size, group, merge)

    @property
    def _buffers(self) -> dict[str, Tensor]:
        """The buffers of the active rank, for which a model may assign other tensors at any time, also of other
        shapes. One that it sets to None or deletes is gone for all ranks of this process."""
        buffers = {name: owner._buffers.get(key) for name, (owner, key) in self._places.items()}
        return {name: buffer for name, buffer in buffers.items() if buffer is not None}

    def _of_active(self) -> _Owned:
        buffers = {name: buffer.clone() for name, buffer in self._buffers.items()} if self.num > 1 else {}
        return _Owned(rng.get_state(*self._devices), buffers)

    def _restore(self, owned: _Owned) -> None:
        rng.set_state(owned.rng, *self._devices)
        now = self._buffers
        _assign(now, owned.buffers)
        for name, buffer in owned.buffers.items():
            if name in now and now[name].shape != buffer.shape:
                module, key = self._places[name]
                module._buffers[key] = buffer.to(now[name].device, copy=True)


class _Owned(NamedTuple):
    """What a rank owns: its random streams and its buffers of the model."""

    rng: rng.Streams
    buffers: dict[str, Tensor]


def _assign(targets: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Copy ``values`` into the tensors of ``targets`` of the same names and shapes. With fixed ranks, a checkpoint
    holds integers, too, of which other runs keep no copies."""
    fitting = [name for name, value in values.items() if name in targets and targets[name].shape == value.shape]
    pairs = [(targets[name], values[name]) for name in fitting]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [value for _, value in pairs])


class GradientTree:
    """Gives ``parameters`` the mean of the gradients of all logical ranks, after ``collect`` was called for each rank
    of this process.

    What a process adds up alone stays in the memory in which the backward pass left it. Then the gradients of one dtype
    are copied into a flat tensor, each at a multiple of 64 bytes, and are views of it, at the same offsets on any
    number of processes. A parameter for which no rank has a gradient gets none.
    """

    def __init__(self, parameters: Sequence[Tensor], ranks: LogicalRanks) -> None:
        self._ranks, self._collected = ranks, 0
        self.num_passes = 0  # that were summed
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        self._parts = [(_Layout(group), ranks.tree(merge=_merged)) for group in kinds.values()]

    def collect(self) -> None:
        """Take the gradients of the rank that was computed last. After the last of this process, exchange them.
        Collective. Raises TrainingError for sparse gradients."""
        for layout, tree in self._parts:
            tree.add(layout.taken())
        self._collected = (self._collected + 1) % len(self._ranks.own)
        if self._collected == 0:
            self.num_passes += 1
            for layout, tree in self._parts:
                layout.assign(tree.total(layout.flat), 1.0 / self._ranks.num)


Gradients = list[Tensor | None]


def _merged(left: Gradients, right: Gradients) -> Gradients:
    """Return ``left`` plus ``right``, in the memory of either. An absent gradient counts as zeros: adding them makes
    0.0 of -0.0."""
    common = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if common:
        torch._foreach_add_([a for a, _ in common], [b for _, b in common])
    if len(common) == len(left):
        return left
    for a, b in zip(left, right, strict=True):
        alone = a if b is None else b if a is None else None
        if alone is not None:
            alone.add_(0.0)
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


class _Layout:
    """The places of the gradients of ``parameters``, of one device and dtype, in a flat tensor. A number per parameter
    at the end says how many ranks have a gradient for it."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self._strides = strides_in_buffer(parameters)
        step = max(_ALIGNMENT // parameters[0].element_size(), 1)
        self._offsets, length = list[int](), 0
        for parameter in parameters:
            self._offsets.append(length)
            length += -(-parameter.numel() // step) * step
        self._length, self._all_present = length, True

    def taken(self) -> Gradients:
        """Return the gradients, which the parameters lose."""
        gradients = [parameter.grad for parameter in self.parameters]
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise TrainingError(
                "a parameter has a sparse gradient, which parallel.logical_ranks cannot sum",
                where="parallel.logical_ranks",
                hint="use sparse=False in the model's embeddings, or remove parallel.logical_ranks",
            )
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def flat(self, gradients: Gradients) -> Tensor:
        """Return ``gradients`` in a flat tensor; what is absent is zeros."""
        flat = self.parameters[0].new_empty(self._length + len(self.parameters))
        pairs = list(zip(self._views(flat), gradients, strict=True))
        present = [(view, gradient) for view, gradient in pairs if gradient is not None]
        if present:
            torch._foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])
        if len(present) == len(pairs):
            flat[self._length :] = 1
        else:
            self._all_present = False
            torch._foreach_zero_([view for view, gradient in pairs if gradient is None])
            flat[self._length :] = torch.tensor([gradient is not None for gradient in gradients], dtype=flat.dtype)
        return flat

    def assign(self, total: Tensor, factor: float) -> None:
        """Give the parameters ``total`` times ``factor`` as gradients. The host waits for the device if a rank of this
        process had no gradient for one of them."""
        flags = [True] * len(self.parameters) if self._all_present else (total[self._length :] != 0).tolist()
        self._all_present = True
        total.mul_(factor)
        for parameter, view, is_used in zip(self.parameters, self._views(total), flags, strict=True):
            parameter.grad = view if is_used else None

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat.as_strided(parameter.shape, strides, offset)
            for parameter, strides, offset in zip(self.parameters, self._strides, self._offsets, strict=True)
        ]
