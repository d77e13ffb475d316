"""Sums over logical ranks: one grouping for every number of processes, and the same bits."""

from __future__ import annotations

import functools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from harness.training.reproducibility import tree_sum
from harness.training.reproducibility.tree_sum import Node, TreeSum, block, merge_into, subtrees_of
from tests.ranks import run_ranks

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def grouping(leaves: list[str]) -> str:
    """The tree's formula, by its definition: halves of the next power of two."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << ((len(leaves) - 1).bit_length() - 1)
    return f"({grouping(leaves[:half])}+{grouping(leaves[half:])})"


@given(st.integers(1, 70), st.data())
def test_the_grouping_does_not_depend_on_the_number_of_processes(num_leaves, data):
    num_processes = data.draw(st.integers(1, num_leaves))
    nodes: list[Node] = []
    for process in range(num_processes):
        own: list[Node] = []
        for leaf in block(num_leaves, process, num_processes):
            merge_into(own, Node(0, leaf, str(leaf)), num_leaves, "({}+{})".format)
        alone = subtrees_of(num_leaves, process, num_processes)
        assert [(node.level, node.place) for node in own] == [(node.level, node.place) for node in alone]
        for node in own:
            merge_into(nodes, node, num_leaves, "({}+{})".format)
    assert [node.value for node in nodes] == [grouping([str(leaf) for leaf in range(num_leaves)])]


@given(st.integers(1, 200))
def test_a_process_keeps_few_sums(num_leaves):
    nodes: list[Node] = []
    for leaf in range(num_leaves):
        merge_into(nodes, Node(0, leaf, None), num_leaves, lambda left, right: None)
        assert len(nodes) <= num_leaves.bit_length()


def leaves(num_leaves: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_leaves)
    return [(torch.randn(length, generator=generator) * 100).to(dtype) for _ in range(num_leaves)]


def sums(num_leaves: int, length: int, gathered: bool = False) -> list[list[int]]:
    """The bytes of the sums in a group of processes, or in this process alone."""
    rank, num_processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = []
    with patch.object(tree_sum, "_SMALL_BYTES", (1 << 20) * gathered):
        for dtype in DTYPES:
            total_sum = TreeSum(num_leaves, rank, num_processes)
            for _ in range(2):  # the second sum has nothing of the first
                for leaf in block(num_leaves, rank, num_processes):
                    total_sum.add(leaves(num_leaves, length, dtype)[leaf].clone())
                total = total_sum.total()
            found.append(total.view(torch.uint8).tolist())
    return found


@pytest.mark.parametrize("gathered", [False, True], ids=["in-pieces", "whole"])
@pytest.mark.parametrize(("num_leaves", "num_processes", "length"), [(6, 2, 37), (6, 4, 37), (8, 3, 2), (5, 5, 1)])
def test_processes_compute_the_bits_of_one(num_leaves, num_processes, length, gathered):
    expected = sums(num_leaves, length)
    assert run_ranks(num_processes, sums, num_leaves, length, gathered) == [expected] * num_processes


def test_another_grouping_has_other_bits():
    """Otherwise the tests above would show nothing."""
    one_by_one = functools.reduce(torch.add, leaves(6, 37, torch.float32))
    assert one_by_one.view(torch.uint8).tolist() != sums(6, 37)[0]
