"""Gradients of logical ranks: one sum on any number of processes, whatever each rank uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.distributed.launch_env import Launch
from harness.distributed.runtime import Runtime
from harness.errors import TrainingError
from harness.training.reproducibility.logical_ranks import GradientTree, LogicalRanks
from tests.ranks import run_ranks

NUM = 6
SHAPES = [(5, 3), (1,), (), (4, 2, 1, 3)]


def gradient(rank: int, place: int, dtype: torch.dtype) -> torch.Tensor | None:
    """That of a parameter. No rank has one for the last, ranks 1, 2 and 5 none for the first; some are -0.0."""
    if place == len(SHAPES) - 1 or (place == 0 and rank in (1, 2, 5)):
        return None
    values = torch.randn(SHAPES[place], generator=torch.Generator().manual_seed(100 * rank + place))
    return torch.where(values < -0.5, -0.0, values).to(dtype)


def mean(dtype: torch.dtype) -> list[Any]:
    """The gradients of this process as bytes, after two steps: what one leaves behind must not change the next."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    ranks = LogicalRanks(Runtime(Launch(rank=rank, world_size=world_size)), NUM)
    ranks.start(nn.Module(), ())
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    parameters[3].data = parameters[3].data.to(memory_format=torch.channels_last)
    tree = GradientTree(parameters, ranks)
    for _ in range(2):
        for logical in ranks.own:
            for place, parameter in enumerate(parameters):
                parameter.grad = gradient(logical, place, dtype)
            tree.collect()
    found = [parameter.grad for parameter in parameters]
    assert all(each is None or each.data_ptr() % 64 == 0 for each in found)
    return [None if each is None else each.reshape(-1).view(torch.uint8).tolist() for each in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_processes", [2, 3, 4, 6])
def test_the_bits_do_not_depend_on_which_process_has_a_gradient(dtype, num_processes):
    assert run_ranks(num_processes, mean, dtype) == [mean(dtype)] * num_processes


def test_a_rank_without_a_gradient_adds_zeros():
    found = mean(torch.float64)
    for place, shape in enumerate(SHAPES[:3]):
        each = [gradient(rank, place, torch.float64) for rank in range(NUM)]
        expected = sum(torch.zeros(shape, dtype=torch.float64) if g is None else g for g in each) / NUM
        values = torch.tensor(found[place], dtype=torch.uint8).view(torch.float64).view(shape)
        torch.testing.assert_close(values, expected)
    assert found[3] is None


def test_a_sparse_gradient_is_refused():
    ranks = LogicalRanks(Runtime(), 2)
    embedding = nn.Embedding(4, 2, sparse=True)
    tree = GradientTree(list(embedding.parameters()), ranks)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TrainingError) as caught:
        tree.collect()
    assert caught.value.where == "parallel.logical_ranks"


def test_ranks_that_are_not_fixed_take_what_fixed_ones_have_saved():
    """Fixed ranks keep their integers, too."""
    saved = LogicalRanks(Runtime(), 2)
    norm = nn.BatchNorm1d(3)
    saved.start(norm, ())
    norm.running_mean.fill_(0.5)
    ranks = LogicalRanks(Runtime(Launch(rank=0, world_size=2)))
    other = nn.BatchNorm1d(3)
    ranks.start(other, ())
    ranks.load_state(saved.state())
    assert other.running_mean.tolist() == [0.5] * 3


def test_a_buffer_that_the_model_replaces_is_that_of_its_rank():
    """Some models assign a new tensor instead of changing the old one."""
    model, ranks = nn.Module(), LogicalRanks(Runtime(), 2)
    model.register_buffer("center", torch.zeros(1))
    ranks.start(model, ())
    for rank, value in enumerate((1.0, 5.0)):
        ranks.activate(rank)
        model.center = torch.full((1,), value)
    ranks.activate(0)
    assert model.center.item() == 1.0
    assert [each["buffers"]["center"].item() for each in ranks.state()] == [1.0, 5.0]
    ranks.average_buffers()
    assert model.center.item() == 3.0


def _of_changing_shapes() -> tuple[list[float], list[list[str]]]:
    """What the buffers are after their mean, and which of them a checkpoint has; ``batch`` has a shape on each rank."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, ranks = nn.Module(), LogicalRanks(Runtime(Launch(rank=rank, world_size=world_size)), 2)
    for name in ("kept", "batch", "grown", "gone", "deleted"):
        model.register_buffer(name, torch.zeros(1))
    ranks.start(model, ())
    for logical in ranks.own:
        ranks.activate(logical)
        model.kept = torch.full((1,), 1.0 + 4 * logical)
        model.batch, model.grown = torch.ones(1 + logical), torch.ones(32)
        model.gone, model._buffers["deleted"] = None, None
        if logical:
            del model.deleted
    ranks.activate(ranks.own.start)
    ranks.average_buffers()
    saved = ranks.state()
    ranks.load_state([saved[0]] * 2)
    return [model.kept.item(), model.batch.sum().item()], [sorted(each["buffers"]) for each in saved]


def test_a_buffer_may_have_another_shape_on_each_rank():
    names = ["batch", "grown", "kept"]
    assert _of_changing_shapes() == ([3.0, 1.0], [names, names])
    assert run_ranks(2, _of_changing_shapes) == [([3.0, 1.0], [names]), ([3.0, 2.0], [names])]


def test_each_rank_keeps_a_buffer_of_another_shape():
    """Also in a checkpoint; a mean of other shapes is not for it."""
    model, ranks = nn.Module(), LogicalRanks(Runtime(), 2)
    model.register_buffer("cache", torch.zeros(1))
    ranks.start(model, ())
    model.cache = torch.full((1,), 7.0)
    ranks.activate(1)
    assert model.cache.tolist() == [0.0]
    model.cache = torch.full((3,), 9.0)
    saved = ranks.state()
    for values in ([7.0], [9.0] * 3, [7.0]):
        ranks.activate(len(values) // 3)
        assert model.cache.tolist() == values
    ranks.start(model, ())
    ranks.load_state(saved)
    ranks.set_buffers({"cache": torch.ones(32)})
    assert model.cache.tolist() == [7.0]
    ranks.activate(1)
    assert model.cache.tolist() == [9.0] * 3
