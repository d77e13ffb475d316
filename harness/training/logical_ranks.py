"""The ranks that a recipe speaks of, and the process that computes them.

Without ``parallel.logical_ranks``, each process is one rank. With it, the recipe has N logical ranks, and each of up to
N processes computes a block of them, one after the other. What belongs to a rank, its random streams and the buffers of
the model, is switched with it. Sums over ranks are then those of one fixed tree (``TreeSum``), so that no result
depends on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.apex.parallel.buckets import strides_in_buffer
from harness.distributed.runtime import Runtime
from harness.errors import TrainingError, plural
from harness.training import rng

_ALIGNMENT = 64  # bytes: kernels may take another path for other offsets
_SMALL_BYTES = 1 << 20  # of all processes together, up to which messages cost more than bytes


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
    nodes: list[Node] = []
    most = 0
    for leaf in block(num, process, num_processes):
        most = max(most, len(nodes) + 1)
        grow(nodes, Node(0, leaf, None), num, lambda left, right: None)
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
        self._buffers: dict[str, Tensor] = {}
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
        self._buffers = {name: b for name, b in module.named_buffers() if self.fixed or b.is_floating_point()}
        for rank in reversed(self.own):
            rng.seed_all(*key, rank)
            self._others[rank] = self._of_active()
        self.active = self.own.start
        self._spare = self._others.pop(self.active).buffers

    def activate(self, rank: int) -> None:
        """Let this process compute as ``rank`` from now on, with its streams and buffers."""
        if rank != self.active:
            _assign(self._spare, self._buffers)
            self._others[self.active] = _Owned(rng.get_state(*self._devices), self._spare)
            owned = self._others.pop(rank)
            self._restore(owned)
            self.active, self._spare = rank, owned.buffers

    def state(self) -> list[dict[str, Any]]:
        """Return what each of this process's ranks owns: its random streams and, if there are several ranks, buffers.
        Loads with ``weights_only=True``."""
        return [
            {"rng": of_rank.rng.plain(), "buffers": {name: buffer.clone() for name, buffer in of_rank.buffers.items()}}
            for of_rank in (self._of_active() if rank == self.active else self._others[rank] for rank in self.own)
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
        own = [{name: b for name, b in of_rank.items() if b.is_floating_point()} for of_rank in self.buffers()]
        if self.num == 1 or not own[0]:
            return
        flat = [torch.cat([buffer.double().reshape(-1) for buffer in of_rank.values()]) for of_rank in own]
        means = (self.sum(flat) / self.num).split([buffer.numel() for buffer in own[0].values()])
        for of_rank in own:
            for buffer, mean in zip(of_rank.values(), means, strict=True):
                buffer.copy_(mean.view_as(buffer))

    def set_buffers(self, values: dict[str, Tensor]) -> None:
        """Give all ranks of this process the buffers ``values``."""
        for buffers in self.buffers():
            for name, value in values.items():
                buffers[name].copy_(value)

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

    def _of_active(self) -> _Owned:
        buffers = {name: buffer.clone() for name, buffer in self._buffers.items()} if self.num > 1 else {}
        return _Owned(rng.get_state(*self._devices), buffers)

    def _restore(self, owned: _Owned) -> None:
        rng.set_state(owned.rng, *self._devices)
        _assign(self._buffers, owned.buffers)


class _Owned(NamedTuple):
    """What a rank owns: its random streams and its buffers of the model."""

    rng: rng.Streams
    buffers: dict[str, Tensor]


def _assign(targets: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Copy ``values`` into the tensors of ``targets`` of the same names. With fixed ranks, a checkpoint holds integers,
    too, of which other runs keep no copies."""
    pairs = [(targets[name], value) for name, value in values.items() if name in targets]
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
            for layout, tree in self._parts:
                layout.assign(tree.total(layout.flat), 1.0 / self._ranks.num)


Gradients = list[Tensor | None]


def _merged(left: Gradients, right: Gradients) -> Gradients:
    """Return ``left`` plus ``right``, in the memory of either. An absent gradient counts as zeros: adding them makes
    0.0 of -0.0."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    if len(both) == len(left):
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
        used = [True] * len(self.parameters) if self._all_present else (total[self._length :] != 0).tolist()
        self._all_present = True
        total.mul_(factor)
        for parameter, view, is_used in zip(self.parameters, self._views(total), used, strict=True):
            parameter.grad = view if is_used else None

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat.as_strided(parameter.shape, strides, offset)
            for parameter, strides, offset in zip(self.parameters, self._strides, self._offsets, strict=True)
        ]


# Sums that have the same bits on any number of processes
#
# Floating-point addition commutes, but its result depends on the grouping. So all numbers of N logical ranks are added
# up in one binary tree: node (k, i) covers the leaves i * 2^k to (i + 1) * 2^k - 1. It is the sum of the nodes (k - 1,
# 2i) and (k - 1, 2i + 1), or equals the first where the second has no leaves. Process r of W holds the leaves of
# ``block``. It adds up what it can, like a binary counter, and keeps the roots of its subtrees. The processes then
# exchange pieces of these, each completes the tree for one piece, and all gather the pieces: 2 * (W - 1) / W of the
# size, as a ring does, where each block is one subtree. Few numbers are gathered whole.


Group = dist.ProcessGroup | None


class Node(NamedTuple):
    """The sum of the leaves from place * 2^level on, up to 2^level of them. ``value`` is None in a plan."""

    level: int
    place: int
    value: Any


def block(num_leaves: int, process: int, num_processes: int) -> range:
    """Return the leaves of ``process``. Every process has at least one if there are no more processes than leaves."""
    return range(process * num_leaves // num_processes, (process + 1) * num_leaves // num_processes)


def grow(nodes: list[Node], new: Node, num_leaves: int, add: Callable[[Any, Any], Any]) -> None:
    """Append ``new`` to ``nodes``, the roots of subtrees from left to right, and merge what is complete. ``add(left,
    right)`` may reuse the memory of ``left``."""
    level, place, value = new
    height = (num_leaves - 1).bit_length()
    while level < height:
        if place % 2:
            if not nodes or nodes[-1][:2] != (level, place - 1):
                break  # another process has the left one
            value = add(nodes.pop().value, value)
        elif (place + 1) << level < num_leaves:
            break
        level, place = level + 1, place // 2
    nodes.append(Node(level, place, value))


def plan(num_leaves: int, process: int, num_processes: int) -> list[Node]:
    """Return the subtrees, without values, that ``process`` can add up alone."""
    nodes: list[Node] = []
    for leaf in block(num_leaves, process, num_processes):
        grow(nodes, Node(0, leaf, None), num_leaves, lambda left, right: None)
    return nodes


class TreeSum:
    """The sum over ``num_leaves`` logical ranks, of which this process, one of ``group``, has a block.

    ``add`` the leaves of the block in order, then call ``total`` on every process. Leaves are flat tensors of the same
    dtype and number of elements or, with another ``merge`` than that of tensors, whatever it takes; see ``grow``.
    """

    def __init__(
        self,
        num_leaves: int,
        process: int = 0,
        num_processes: int = 1,
        group: Group = None,
        merge: Callable[[Any, Any], Any] = Tensor.add_,
    ) -> None:
        self._num_leaves, self._num_processes, self._group, self._merge = num_leaves, num_processes, group, merge
        self._first, self._nodes, self._next = block(num_leaves, process, num_processes).start, list[Node](), 0

    def add(self, leaf: Any) -> None:
        """Add the next leaf, whose memory the sum then owns."""
        grow(self._nodes, Node(0, self._first + self._next, leaf), self._num_leaves, self._merge)
        self._next += 1

    def total(self, flat: Callable[[Any], Tensor] = lambda value: value) -> Tensor:
        """Return the sum over all logical ranks, equal on every process, of what ``flat`` makes of values. The next
        call of ``add`` starts another. Collective. The memory may be that of a leaf."""
        roots, self._nodes, self._next = [flat(node.value) for node in self._nodes], [], 0
        if self._num_processes == 1:
            return roots[0]
        return exchanged(roots, self._num_leaves, self._num_processes, self._group)


def exchanged(roots: Sequence[Tensor], num_leaves: int, num_processes: int, group: Group = None) -> Tensor:
    """Return the sum over all logical ranks, where ``roots``, flat tensors, are what this process can add up alone.
    Every process completes the tree for one piece. Collective."""
    plans = [plan(num_leaves, process, num_processes) for process in range(num_processes)]
    same = all(len(of_process) == len(roots) for of_process in plans)
    if same and roots[0].nbytes * len(roots) * num_processes <= _SMALL_BYTES:
        return _gathered(roots, plans, num_leaves, group)
    length, dtype_bytes = len(roots[0]), roots[0].element_size()
    longest = -(-length // num_processes)
    firsts = range(0, longest * num_processes, longest)
    pieces = [root[first : first + longest] for first in firsts for root in roots]
    own = roots[0] if len(roots) == 1 else torch.cat(pieces)
    received = own.new_empty(sum(map(len, plans)), len(pieces[dist.get_rank(group) * len(roots)]))
    dist.all_to_all_single(
        _bytes(received),
        _bytes(own),
        [len(of_process) * received.shape[1] * dtype_bytes for of_process in plans],
        [len(piece) * len(roots) * dtype_bytes for piece in pieces[:: len(roots)]],
        group=group,
    )
    total = nn.functional.pad(_grown(plans, received, num_leaves), (0, longest - received.shape[1]))
    gathered = own.new_empty(num_processes * longest)
    dist.all_gather(list(_bytes(gathered).view(num_processes, -1)), _bytes(total), group=group)
    return gathered[:length]


def _gathered(roots: Sequence[Tensor], plans: Sequence[list[Node]], num_leaves: int, group: Group) -> Tensor:
    """Return ``exchanged`` of few numbers, for which one message of all of them is quicker than two of their pieces."""
    own = roots[0] if len(roots) == 1 else torch.cat(list(roots))
    received = own.new_empty(len(plans) * len(roots), len(roots[0]))
    dist.all_gather(list(_bytes(received).view(len(plans), -1)), _bytes(own), group=group)
    return _grown(plans, received, num_leaves)


def _grown(plans: Sequence[list[Node]], values: Tensor, num_leaves: int) -> Tensor:
    """Return the root of the tree, of which ``values`` are the rows in the order of ``plans``."""
    tree: list[Node] = []
    everyone: Iterable[Node] = (node for of_process in plans for node in of_process)
    for node, value in zip(everyone, values, strict=True):
        grow(tree, node._replace(value=value), num_leaves, Tensor.add_)
    total: Tensor = tree[0].value
    return total


def _bytes(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as bytes, which every back end moves, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)
