"""Reducer: averages on request, over real gloo ranks (contract 5.2); the old collectives over lists of tensors."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.apex import amp, apex_C
from harness.apex.parallel import DistributedDataParallel, Reducer
from harness.apex.parallel import collectives as flat
from tests.apex.shared import LEVELS, Numbers, distinct, gradients
from tests.ranks import run_ranks
from tests.syncs import fakes


def _module() -> None:
    rank = dist.get_rank()
    model = Numbers(dtypes=(torch.float32, torch.bfloat16, torch.float64))
    model.register_buffer("count", torch.tensor([rank]))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(5.0 - rank)
    reducer = Reducer(model)
    assert distinct(model.parameters()) == [[5.0]] * 3, "of rank 0"
    assert model.count.item() == 0
    reducer.reduce()
    assert gradients(model) == [None] * 3
    for _ in range(2):  # the second time in buffers that hold the values of the first
        model.zero_grad()
        model([1.0 + rank] * 3).backward()
        assert gradients(model) == [[1.0 + rank]] * 3, "nothing happens by itself"
        kept = [p.grad for p in model.parameters()]
        reducer.reduce()
        assert gradients(model) == [[1.5]] * 3
        assert all(p.grad is grad for p, grad in zip(model.parameters(), kept, strict=True)), "in place"
    assert [p.grad.dtype for p in model.parameters()] == [p.dtype for p in model.parameters()]


def _unused() -> None:
    """Parameters of equal size, used on one rank or the other; a flat buffer of only these would mix them up."""
    rank = dist.get_rank()
    model = Numbers(sizes=(4, 4, 4))
    reducer = Reducer(model)
    for mine_0, mine_1, expected in (
        ([1.0, None, None], [None, 5.0, None], [[0.5], [2.5], None]),
        ([None, None, None], [None, 3.0, 1.0], [None, [1.5], [0.5]]),
        ([2.0, 2.0, 2.0], [None, 4.0, 2.0], [[1.0], [3.0], [2.0]]),
    ):
        model.zero_grad()
        loss = model(mine_1 if rank else mine_0)
        if isinstance(loss, torch.Tensor):
            loss.backward()
        reducer.reduce()
        assert gradients(model) == expected
    model.zero_grad()
    model.list[1].requires_grad_(False)
    model([1.0 + rank] * 3).backward()
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
        reducer.reduce()
    assert gradients(model) == [[1.5], None, [1.5]]
    assert [call.args[0].numel() for call in spy.call_args_list] == [8 + 2], "two gradients, two flags"
    model.list[1].requires_grad_(True)
    model.zero_grad()
    model([1.0 + rank] * 3).backward()
    reducer.reduce()
    assert gradients(model) == [[1.5]] * 3, "unfrozen later"


def _tensors() -> None:
    rank = dist.get_rank()
    a, b = torch.full((2, 3), 1.0 + rank), torch.full((4,), 3.0 * rank, dtype=torch.float64)
    c = torch.full((), 2.0 * rank, dtype=torch.float16)
    nested = [a, (b, iter([c])), []]
    reducer = Reducer(nested)
    reducer.reduce()
    assert (a.unique().tolist(), b.unique().tolist(), c.item()) == ([1.5], [1.5], 1.0)
    a.fill_(rank)
    reducer.reduce()
    assert (a.unique().tolist(), b.unique().tolist()) == ([0.5], [1.5])
    single = torch.full((3,), float(rank))
    Reducer(single).reduce()
    assert single.tolist() == [0.5] * 3
    for wrong in ([a, None], ["a"], [3.0]):
        with pytest.raises(TypeError, match="pass the module"):
            Reducer(wrong)
    Reducer([]).reduce()


def _many_pieces() -> None:
    rank = dist.get_rank()
    tensors = [torch.full((400_000,), float(i + rank)) for i in range(6)]
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
        Reducer(tensors).reduce()
    assert spy.call_count > 1
    assert distinct(tensors) == [[i + 0.5] for i in range(6)]


def _sparse() -> None:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1, bias=False))
    reducer = Reducer(model)
    with torch.no_grad():
        model[1].weight.fill_(1.0)
    model(torch.tensor([1, 3 if rank else 1])).sum().backward()
    reducer.reduce()
    assert model[0].weight.grad[:, 0].tolist() == [0.0, 1.5, 0.0, 0.5, 0.0]
    model.zero_grad()
    reducer.reduce()
    assert model[0].weight.grad is None
    (model[1](torch.ones(2)) if rank else model(torch.tensor([1, 2]))).sum().backward()
    reducer.reduce()
    assert model[0].weight.grad[:, 0].tolist() == [0.0, 0.5, 0.5, 0.0, 0.0], "from one rank alone"


def _inside_scale_loss() -> None:
    """Weights and loss scales stay equal on both ranks, also through an overflow on one."""
    rank = dist.get_rank()
    for level in LEVELS:
        amp.reset()
        model = Numbers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=64.0, verbosity=0)
        reducer = Reducer(model)
        for step in range(3):
            number = torch.tensor(float("inf") if step == 1 and rank == 1 else 1.0 + rank)
            with amp.scale_loss(model([number, 2.0, None if rank else number]), optimizer) as loss:
                loss.backward()
                reducer.reduce()
            optimizer.step()
            optimizer.zero_grad()
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32.0, "unskipped": 1}, level
        found = distinct(model.parameters())
        assert found == [[1 - 2 * 0.5 * 1.5], [1 - 2 * 0.5 * 2.0], [1 - 2 * 0.5 * 0.5]], (level, found)
    amp.reset()


def _ranks_that_differ() -> None:
    rank = dist.get_rank()
    for sizes, other in (((2, 3), (2, 4)), ((2, 3), (3, 2)), ((2, 3), (5,)), ((2, 3), ()), ((), (5,))):
        mine = other if rank else sizes
        with pytest.raises(RuntimeError, match="same model on every rank"):
            Reducer(Numbers(sizes=mine, dtypes=(torch.float32,) * len(mine)))


def _unusual_buffers() -> None:
    """Of dtypes that gloo does not know, expanded or empty ones; sparse ones are left alone."""
    rank = dist.get_rank()
    dtypes = (torch.int16, torch.uint32, torch.float8_e4m3fn, torch.complex64, torch.bool)
    for wrap in (DistributedDataParallel, Reducer):
        model = nn.Linear(1, 1)
        for dtype in dtypes:
            model.register_buffer(str(dtype)[6:], torch.full((3,), 1 - rank).to(dtype))
        model.register_buffer("expanded", torch.full((2, 1, 1), 1.0 - rank).expand(2, 3, 4))
        model.register_buffer("empty", torch.ones(0, 3))
        for layout in (torch.sparse_coo, torch.sparse_csr):
            model.register_buffer(str(layout)[6:], (torch.eye(2) * rank).to_sparse(layout=layout))
        wrap(model)
        for dtype in dtypes:
            assert model.get_buffer(str(dtype)[6:]).to(torch.complex64).tolist() == [1.0] * 3, dtype
        assert model.expanded.unique().tolist() == [1.0]
        assert [each.to_dense().max().item() for each in (model.sparse_coo, model.sparse_csr)] == [rank] * 2


def _flat_calls() -> None:
    rank = dist.get_rank()
    tensors = [torch.full((2, 2), rank + 1.0), torch.full((3,), float(rank)).half(), torch.full((1,), 4.0 * rank)]
    flat.flat_dist_call(tensors, dist.all_reduce)
    assert distinct(tensors) == [[1.5], [0.5], [2.0]]
    weights = [torch.full((2,), float(rank)), torch.full((2,), float(rank)).bfloat16()]
    flat.flat_dist_call(weights, dist.broadcast, (1,))
    assert [tensor.tolist() for tensor in weights] == [[1.0, 1.0], [1.0, 1.0]]


def _all_on_two_ranks() -> None:
    for body in (
        _module,
        _unused,
        _tensors,
        _many_pieces,
        _sparse,
        _inside_scale_loss,
        _ranks_that_differ,
        _unusual_buffers,
        _flat_calls,
    ):
        torch.manual_seed(0)
        body()
        dist.barrier()


@pytest.mark.contract("1.1", "5.2", "10.4", "10.5")
def test_two_ranks():
    run_ranks(2, _all_on_two_ranks, timeout_s=60)


@fakes
@pytest.mark.host
@pytest.mark.contract("5.1.1", "5.2")
def test_values_on_the_cpu_go_through_the_gpu_where_the_backend_takes_no_others():
    """As buffers of a model may under nccl, which Apex did not send."""
    with (
        FakeTensorMode(),
        mock.patch.object(dist, "get_world_size", return_value=2),
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
        mock.patch.object(flat, "_check_alike", return_value=True),
        mock.patch.object(dist, "broadcast") as broadcast,
    ):
        flat.broadcast_from_rank_zero([torch.ones(2, device="cuda:1"), torch.ones(3), torch.ones(1).bool()])
    assert [str(call.args[0].device) for call in broadcast.call_args_list] == ["cuda:1"] * 3


@pytest.mark.contract("1.1")
def test_flatten_and_unflatten():
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor(7.0), torch.empty(0, 4), torch.ones(2, 2).t()]
    vector = apex_C.flatten(tensors)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 7, 1, 1, 1, 1]
    views = apex_C.unflatten(vector, tensors)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    vector.zero_()
    assert not any(view.any() for view in views), "they are views"


@pytest.mark.host
@pytest.mark.contract("1.1")
def test_splitting_and_extracting():
    half, single, other = torch.ones(1).half(), torch.ones(2), torch.ones(3)
    assert list(flat.split_by_type([single, half, other])) == ["torch.FloatTensor", "torch.HalfTensor"]
    assert [len(group) for group in flat.split_half_float_double([single, half, other])] == [1, 2]
    found: list[torch.Tensor] = []
    flat.extract_tensors([single, {"a": half}.values(), (other, 3, "text", None)], found)
    assert [id(tensor) for tensor in found] == [id(single), id(half), id(other)]
