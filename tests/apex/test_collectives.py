"""Collectives over lists of tensors, as scripts imported them from ``apex.parallel.distributed`` and ``apex_C``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness.apex import apex_C
from harness.apex.parallel import collectives as flat
from tests.apex.shared import distinct
from tests.ranks import run_ranks


@pytest.mark.contract("1.1")
def test_flatten_and_unflatten():
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor(7.0), torch.empty(0, 4), torch.ones(2, 2).t()]
    vector = apex_C.flatten(tensors)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 7, 1, 1, 1, 1]
    views = apex_C.unflatten(vector, tensors)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    vector.zero_()
    assert not any(view.any() for view in views), "they are views"


@pytest.mark.contract("1.1")
def test_splitting_and_extracting():
    half, single, other = torch.ones(1).half(), torch.ones(2), torch.ones(3)
    assert list(flat.split_by_type([single, half, other])) == ["torch.FloatTensor", "torch.HalfTensor"]
    assert [len(group) for group in flat.split_half_float_double([single, half, other])] == [1, 2]
    found: list[torch.Tensor] = []
    flat.extract_tensors([single, {"a": half}.values(), (other, 3, "text", None)], found)
    assert [id(tensor) for tensor in found] == [id(single), id(half), id(other)]


def _calls():
    rank = dist.get_rank()
    tensors = [torch.full((2, 2), rank + 1.0), torch.full((3,), float(rank)).half(), torch.full((1,), 4.0 * rank)]
    flat.flat_dist_call(tensors, dist.all_reduce)
    averaged = distinct(tensors)
    weights = [torch.full((2,), float(rank)), torch.full((2,), float(rank)).bfloat16()]
    flat.flat_dist_call(weights, dist.broadcast, (1,))
    return averaged, [tensor.tolist() for tensor in weights]


@pytest.mark.contract("1.1")
def test_collectives_on_two_ranks():
    for result in run_ranks(2, _calls):
        assert result == ([[1.5], [0.5], [2.0]], [[1.0, 1.0], [1.0, 1.0]])
