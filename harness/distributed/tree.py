"""Sums over logical ranks that have the same bits on any number of processes.

Floating-point addition commutes, but its result depends on the grouping. So all numbers of N logical ranks are added
up in one binary tree: node (k, i) covers the leaves i * 2^k to (i + 1) * 2^k - 1. It is the sum of the nodes
(k - 1, 2i) and (k - 1, 2i + 1), or equals the first where the second has no leaves. Process r of W holds the leaves of
``block``. It adds up what it can, like a binary counter, and keeps the roots of its subtrees. The processes then
exchange pieces of these, each completes the tree for one piece, and all gather the pieces: 2 * (W - 1) / W of the size,
as a ring does, where each block is one subtree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Node(NamedTuple):
    """The sum of the leaves from place * 2^level on, up to 2^level of them. ``value`` is None in a plan."""

    level: int
    place: int
    value: Any


def block(num_leaves: int, process: int, num_processes: int) -> range:
    """The leaves of ``process``. Every process has at least one if there are no more processes than leaves."""
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
    """The subtrees, without values, that ``process`` can add up alone."""
    nodes: list[Node] = []
    for leaf in block(num_leaves, process, num_processes):
        grow(nodes, Node(0, leaf, None), num_leaves, lambda left, right: None)
    return nodes


class TreeSum:
    """The sum over ``num_leaves`` logical ranks, of which this process, one of ``group``, has a block.

    ``add`` the leaves of the block in order, then call ``total`` on every process. Leaves are flat tensors of the same
    dtype and number of elements.
    """

    def __init__(self, num_leaves: int, process: int = 0, num_processes: int = 1, group: Any = None) -> None:
        self._num_leaves, self._num_processes, self._group = num_leaves, num_processes, group
        self._first, self._nodes, self._next = block(num_leaves, process, num_processes).start, list[Node](), 0

    def add(self, leaf: Tensor) -> None:
        """Add the next leaf, whose memory the sum then owns."""
        grow(self._nodes, Node(0, self._first + self._next, leaf), self._num_leaves, Tensor.add_)
        self._next += 1

    def total(self) -> Tensor:
        """The sum over all logical ranks, equal on every process; the next call of ``add`` starts another. Collective.
        The memory may be that of a leaf."""
        nodes, self._nodes, self._next = self._nodes, [], 0
        if self._num_processes == 1:
            root: Tensor = nodes[0].value
            return root
        return exchanged(nodes, self._num_leaves, self._num_processes, self._group)


def exchanged(nodes: Sequence[Node], num_leaves: int, num_processes: int, group: Any = None) -> Tensor:
    """The root of the tree of which this process has ``nodes``: every process completes one piece of it. Collective."""
    (length,) = nodes[0].value.shape
    piece = -(-length // num_processes)
    own = nodes[0].value.new_zeros(num_processes, len(nodes), piece)
    for place, node in enumerate(nodes):
        whole, rest = divmod(length, piece)
        own[:whole, place] = node.value[: whole * piece].view(whole, piece)
        if rest:
            own[whole, place, :rest] = node.value[whole * piece :]
    plans = [plan(num_leaves, process, num_processes) for process in range(num_processes)]
    received = own.new_empty(sum(map(len, plans)), piece)
    row = piece * own.element_size()
    sizes = [len(of_process) * row for of_process in plans], [len(nodes) * row] * num_processes
    dist.all_to_all_single(_bytes(received), _bytes(own), *sizes, group=group)
    tree: list[Node] = []
    everyone: Iterable[Node] = (node for of_process in plans for node in of_process)
    for node, value in zip(everyone, received, strict=True):
        grow(tree, node._replace(value=value), num_leaves, Tensor.add_)
    gathered = own.new_empty(num_processes * piece)
    dist.all_gather(list(_bytes(gathered).view(num_processes, row)), _bytes(tree[0].value), group=group)
    return gathered[:length]


def _bytes(tensor: Tensor) -> Tensor:
    """``tensor`` as bytes, which every back end moves, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)
