"""Sums that have the same bits on any number of processes.

Floating-point addition commutes, but its result depends on the grouping. So all numbers of N logical ranks are added
up in one binary tree: node (k, i) covers the leaves i * 2^k to (i + 1) * 2^k - 1. It is the sum of the nodes (k - 1,
2i) and (k - 1, 2i + 1), or equals the first where the second has no leaves. Process r of W holds the leaves of
``block``. It adds up what it can, like a binary counter, and keeps the roots of its subtrees. After each of 6 leaves:

    leaf 0    (0, 0)
    leaf 1    (1, 0)              the sum of leaves 0 and 1
    leaf 2    (1, 0), (0, 2)
    leaf 3    (2, 0)              leaf 3 completes (1, 1), and that (2, 0)
    leaf 4    (2, 0), (0, 4)
    leaf 5    (3, 0)              the sum of all: leaf 5 completes (1, 2), which is (2, 1) and completes (3, 0)

The processes then exchange pieces of their roots, each completes the tree for one piece, and all gather the pieces:
2 * (W - 1) / W of the size, as a ring does, where each block is one subtree. Few numbers are gathered whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Group = dist.ProcessGroup | None
T = TypeVar("T")

_SMALL_BYTES = 1 << 20  # of all processes together, up to which messages cost more than bytes


@dataclass
class Node(Generic[T]):  # Python 3.10 has no generic NamedTuple
    """The sum of the leaves from place * 2^level on, up to 2^level of them. ``value`` is None in a plan."""

    level: int
    place: int
    value: T


def block(num_leaves: int, process: int, num_processes: int) -> range:
    """Return the leaves of ``process``. Every process has at least one if there are no more processes than leaves."""
    return range(process * num_leaves // num_processes, (process + 1) * num_leaves // num_processes)


def merge_into(nodes: list[Node[T]], new: Node[T], num_leaves: int, add: Callable[[T, T], T]) -> None:
    """Append ``new`` to ``nodes``, the roots of subtrees from left to right, and merge what is complete. ``add(left,
    right)`` may reuse the memory of ``left``."""
    level, index, value = new.level, new.place, new.value
    height = (num_leaves - 1).bit_length()
    while level < height:
        if index % 2:
            if not nodes or (nodes[-1].level, nodes[-1].place) != (level, index - 1):
                break  # another process has the left one
            value = add(nodes.pop().value, value)
        elif (index + 1) << level < num_leaves:
            break
        level, index = level + 1, index // 2
    nodes.append(Node(level, index, value))


def subtrees_of(num_leaves: int, process: int, num_processes: int) -> list[Node[None]]:
    """Return the subtrees, without values, that ``process`` can add up alone."""
    nodes: list[Node[None]] = []
    for leaf in block(num_leaves, process, num_processes):
        merge_into(nodes, Node(0, leaf, None), num_leaves, lambda left, right: None)
    return nodes


class TreeSum:
    """The sum over ``num_leaves`` logical ranks, of which this process, one of ``group``, has a block.

    ``add`` the leaves of the block in order, then call ``total`` on every process. Leaves are flat tensors of the same
    dtype and number of elements or, with another ``merge`` than that of tensors, whatever it takes; see ``merge_into``.
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
        self._first, self._nodes, self._next = block(num_leaves, process, num_processes).start, list[Node[Any]](), 0

    def add(self, leaf: Any) -> None:
        """Add the next leaf, whose memory the sum then owns."""
        merge_into(self._nodes, Node(0, self._first + self._next, leaf), self._num_leaves, self._merge)
        self._next += 1

    def total(self, flat: Callable[[Any], Tensor] = lambda value: value) -> Tensor:
        """Return the sum over all logical ranks, equal on every process, of what ``flat`` makes of values. The next
        call of ``add`` starts another. Collective. The memory may be that of a leaf."""
        roots, self._nodes, self._next = [flat(node.value) for node in self._nodes], [], 0
        if self._num_processes == 1:
            return roots[0]
        return sum_by_pieces(roots, self._num_leaves, self._num_processes, self._group)


def sum_by_pieces(roots: Sequence[Tensor], num_leaves: int, num_processes: int, group: Group = None) -> Tensor:
    """Return the sum over all logical ranks, where ``roots``, flat tensors, are what this process can add up alone.
    Every process completes the tree for one piece. Collective."""
    plans = [subtrees_of(num_leaves, process, num_processes) for process in range(num_processes)]
    equal_plans = all(len(of_process) == len(roots) for of_process in plans)
    if equal_plans and roots[0].nbytes * len(roots) * num_processes <= _SMALL_BYTES:
        return _sum_gathered(roots, plans, num_leaves, group)
    length, dtype_bytes = len(roots[0]), roots[0].element_size()
    longest = -(-length // num_processes)
    firsts = range(0, longest * num_processes, longest)
    pieces = [root[first : first + longest] for first in firsts for root in roots]
    own_values = roots[0] if len(roots) == 1 else torch.cat(pieces)
    received = own_values.new_empty(sum(map(len, plans)), len(pieces[dist.get_rank(group) * len(roots)]))
    dist.all_to_all_single(
        _bytes(received),
        _bytes(own_values),
        [len(of_process) * received.shape[1] * dtype_bytes for of_process in plans],
        [len(piece) * len(roots) * dtype_bytes for piece in pieces[:: len(roots)]],
        group=group,
    )
    total = nn.functional.pad(_sum_of_nodes(plans, received, num_leaves), (0, longest - received.shape[1]))
    gathered = own_values.new_empty(num_processes * longest)
    dist.all_gather(list(_bytes(gathered).view(num_processes, -1)), _bytes(total), group=group)
    return gathered[:length]


def _sum_gathered(roots: Sequence[Tensor], plans: Sequence[list[Node[None]]], num_leaves: int, group: Group) -> Tensor:
    """Return ``sum_by_pieces`` of few numbers, for which one message of all of them is quicker than two of pieces."""
    own_values = roots[0] if len(roots) == 1 else torch.cat(list(roots))
    received = own_values.new_empty(len(plans) * len(roots), len(roots[0]))
    dist.all_gather(list(_bytes(received).view(len(plans), -1)), _bytes(own_values), group=group)
    return _sum_of_nodes(plans, received, num_leaves)


def _sum_of_nodes(plans: Sequence[list[Node[None]]], values: Tensor, num_leaves: int) -> Tensor:
    """Return the root of the tree, of which ``values`` are the rows in the order of ``plans``."""
    tree: list[Node[Tensor]] = []
    everyone: Iterable[Node[None]] = (node for of_process in plans for node in of_process)
    for node, value in zip(everyone, values, strict=True):
        merge_into(tree, Node(node.level, node.place, value), num_leaves, Tensor.add_)
    return tree[0].value


def _bytes(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as bytes, which every back end moves, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)
