"""DistributedDataParallel on two gloo ranks, compared with one process that has all the data (contract 5.1)."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from contextlib import nullcontext, suppress
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.apex import amp
from harness.apex.accumulated_gradients import announce_aside, withdraw_aside
from harness.apex.amp.stash import AmpStash
from harness.apex.optimizers import FusedSGD
from harness.apex.parallel import DistributedDataParallel, Reducer, buckets
from harness.apex.parallel.backward_reducer import BackwardReducer
from tests.apex.shared import LEVELS, Numbers, backward, copies, distinct, gradients
from tests.ranks import run_ranks


def _train(level, rank, accumulate, *, batch_norm=False, wrap_first=False, overflows=False, loss_scale=None, **options):
    """Train three steps of two micro-batches (one with ``accumulate="none"``); with ``rank`` None on the data of both
    ranks, without a wrapper. Returns all weights and masters, and amp's state."""
    amp.reset()
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 4))
    if wrap_first:
        model = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.warns(UserWarning, match="already in") if wrap_first and rank == 0 else nullcontext():
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=loss_scale)
    net = model if rank is None or wrap_first else DistributedDataParallel(model, **options)
    torch.manual_seed(5)
    for step in range(3):
        for first in (True, False) if accumulate != "none" else (False,):
            batch = torch.randn(2, 6, 8)
            x = batch.flatten(0, 1) if rank is None else batch[rank]
            x = x * 1e30 if overflows and step == 1 and rank == 1 else x
            local = first and accumulate in ("local", "delayed")
            with net.no_sync() if local and rank is not None else nullcontext():
                backward(net(x).float().pow(2).mean(), optimizer, delay_unscale=first and accumulate == "delayed")
        optimizer.step()
        optimizer.zero_grad()
    masters = list(amp.master_params(optimizer))
    if not overflows:
        assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(model.parameters(), masters, strict=True))
    return copies([*model.parameters(), *masters]), amp.state_dict()


def _equal_on_all_ranks(tensors) -> bool:
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, [t.detach().float().nan_to_num(7.0).tolist() for t in tensors])
    return all(each == ranks[0] for each in ranks)


def _compare_with_one_process(delay: bool) -> None:
    cases = [*((level, None) for level in LEVELS), ("O0", "dynamic"), ("O3", "dynamic")]
    for (level, scale), accumulate in itertools.product(cases, ("every", "local", "delayed")):
        options = {"loss_scale": scale, "delay_allreduce": delay}
        expected, scalers = _train(level, None, accumulate, **options)
        found, found_scalers = _train(level, dist.get_rank(), accumulate, **options)
        assert found_scalers == scalers, (level, accumulate)
        tolerance = 1e-6 if level == "O0" else 2e-2 if level in ("O4", "O5") else 3e-3
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(b.float(), a.float(), rtol=tolerance, atol=tolerance)
        assert _equal_on_all_ranks(found), (level, scale, accumulate)
    amp.reset()


@pytest.mark.contract("5.1.2", "5.1.3", "5.1.6", "5.1.7", "6.4.amp_master_params", "10.3", "8")
@pytest.mark.parametrize("delay", [True, False])
def test_two_ranks_train_like_one_process_with_all_data(delay):
    run_ranks(2, _compare_with_one_process, delay)


def _either_order() -> None:
    ways = ("none", False), ("none", True), ("local", False), ("delayed", False)
    for case in itertools.product(("O1", "O2"), BOTH[:2], ways):  # casts of functions, and of the model
        level, options, (accumulate, overflows) = case
        results = [
            _train(
                level, dist.get_rank(), accumulate, batch_norm=True, wrap_first=first, overflows=overflows, **options
            )
            for first in (True, False)
        ]
        (found, state), (expected, expected_state) = results
        assert state == expected_state, case
        assert _equal_on_all_ranks(found), case
        for one, other in zip(found, expected, strict=True):
            assert one.dtype is other.dtype, case
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), case
    amp.reset()


def _wrap(model=None, **options):
    model = Numbers() if model is None else model
    return DistributedDataParallel(model, **options)


BOTH = [{"delay_allreduce": True}, {"delay_allreduce": False, "message_size": 1}, {"delay_allreduce": False}]


def _averages() -> None:
    rank = dist.get_rank()
    for options in BOTH:
        for extra, expected in (
            ({}, 1.5),
            ({"gradient_predivide_factor": 2.0}, 1.5),
            ({"gradient_average": False}, 3.0),
            ({"gradient_average": False, "gradient_predivide_factor": 2.0}, 1.5),
            ({"allreduce_always_fp32": True}, 1.5),
            ({"retain_allreduce_buffers": True}, 1.5),
        ):
            net = _wrap(**options, **extra)

            def run(net=net):
                net([1.0 + rank] * 3).backward()
                return gradients(net)

            for _ in range(3):
                assert run() == [[expected]] * 3, (options, extra)
                net.zero_grad()
            run()
            assert run() == [[2 * expected]] * 3, ("accumulated, reduced each time", options, extra)
            net.zero_grad()
            for _ in range(2):
                with net.no_sync():
                    assert run()[0] != [expected]
            assert run() == [[3 * expected]] * 3, ("accumulated, reduced at the end", options, extra)
            assert run() == [[4 * expected]] * 3, ("reduced twice", options, extra)
            if extra.get("retain_allreduce_buffers"):
                assert sum(flat.numel() for flat in net.allreduce_buffers) == 9


def _dtypes() -> None:
    rank = dist.get_rank()
    kinds = (torch.float16, torch.bfloat16, torch.float64)
    for options in BOTH:
        for fp32 in (False, True):
            net = _wrap(Numbers(dtypes=kinds), allreduce_always_fp32=fp32, **options)
            net([1.0 + rank] * 3).backward()
            assert gradients(net) == [[1.5]] * 3
            assert [p.grad.dtype for p in net.parameters()] == list(kinds)
            sent = {flat.dtype for flat in net.allreduce_buffers}
            assert sent == ({torch.float32, torch.float64} if fp32 else set(kinds))


def _unused() -> None:
    rank = dist.get_rank()
    for options in BOTH:
        for average in (True, False):
            net = _wrap(gradient_average=average, **options)
            half = 0.5 if average else 1.0
            patterns = [
                ([1.0, None, 2.0], [3.0, None, 2.0], [[4 * half], None, [4 * half]]),
                # Apex, which compared element counts, averaged these two with each other
                ([1.0, None, None], [None, 5.0, None], [[1 * half], [5 * half], None]),
                ([None, None, 2.0], [1.0, 1.0, 1.0], [[1 * half], [1 * half], [3 * half]]),
                ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [[2 * half]] * 3),
            ]
            for mine_0, mine_1, expected in patterns + patterns[::-1]:
                net.zero_grad()
                net(mine_1 if rank else mine_0).backward()
                assert gradients(net) == expected, (options, average)
            net.zero_grad()
            net([1.0, None, 1.0] if rank == 0 else [None, None, 1.0]).backward()
            net([None, 4.0, 1.0] if rank == 0 else [1.0, 4.0, None]).backward()
            assert gradients(net) == [[2 * half], [8 * half], [3 * half]], ("accumulated", options, average)


def _several_backwards() -> None:
    rank = dist.get_rank()
    for options in BOTH:
        net = _wrap(**options)
        out = net([1.0 + rank] * 3)
        out.backward(retain_graph=True)
        out.backward()
        assert gradients(net) == [[3.0]] * 3
        net.zero_grad()
        (net([1.0 + rank] * 3) + net([1.0 + rank] * 3)).backward()
        assert gradients(net) == [[3.0]] * 3
        net.zero_grad()

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, g):
                raise ZeroDivisionError

        with suppress(ZeroDivisionError):
            early = Fails.apply(torch.ones((), requires_grad=True))  # recorded first, so its backward runs last
            net([early, 1.0, 1.0]).backward()
        assert all(p.grad is not None for p in net.parameters()), "the pass raised before it reached anything"
        net.zero_grad()
        net([1.0 + rank] * 3).backward()
        assert gradients(net) == [[1.5]] * 3, "after a backward pass that raised"


def _local_overflow() -> None:
    """An inf on one rank, in a micro-batch that is not reduced: both ranks skip and halve once, at the end."""
    rank = dist.get_rank()
    for level in ("O0", "O1", "O2", "O3"):
        for delay_unscale in (False, True):
            amp.reset()
            model = Numbers()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=64.0, verbosity=0)
            net = _wrap(model, delay_allreduce=True)
            with net.no_sync():
                bad = float("inf") if rank == 0 else 1.0
                numbers = [torch.tensor(x) for x in (bad, 1.0, bad)]  # the last pass reaches the middle one
                backward(net(numbers), optimizer, delay_unscale=delay_unscale)
            assert not optimizer._amp_stash.already_patched
            assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 64.0, "unskipped": 0}
            backward(net([None, torch.tensor(1.0), None]), optimizer)
            assert optimizer._amp_stash.already_patched, level
            assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32.0, "unskipped": 0}
            optimizer.step()
            optimizer.zero_grad()
            with net.no_sync(), amp.scale_loss(net([torch.tensor(1.0 + rank)] * 3), optimizer) as loss:
                loss.backward()
            backward(net([torch.tensor(1.0 + rank), None, None]), optimizer)
            assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32.0, "unskipped": 2}, "both contexts count"
            optimizer.step()
            found = distinct(net.parameters())
            assert found == [[1 - 0.5 * 3.0], [1 - 0.5 * 1.5], [1 - 0.5 * 1.5]], (level, found)
    amp.reset()


def _views_of_buffers() -> None:
    """Gradients that the next reduction overwrites while amp keeps them, in buffers of one parameter and of several."""
    rank = dist.get_rank()
    for sizes in ((3,), (3, 2, 4)):
        model = Numbers(sizes, (torch.float32,) * len(sizes))
        numbers = [1.0 + rank] * len(sizes)
        torch_ddp = functools.partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True)
        for wrap in (torch_ddp, functools.partial(DistributedDataParallel, retain_allreduce_buffers=True)):
            amp.reset()
            optimizer = FusedSGD(model.parameters(), lr=0.0, set_grad_none=False)
            amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
            net = wrap(model)
            for _ in range(2):  # the second time with gradients of zeros
                for contexts in (1, 2, 3):
                    backward(net(numbers), optimizer)
                    assert gradients(model) == [[1.5 * contexts]] * len(sizes), (sizes, wrap.func, contexts)
                optimizer.step()
                optimizer.zero_grad()
            model.zero_grad()
    amp.reset()


def _no_sync_of_torch() -> None:
    """Accumulates as docs/apex_differences.md has it."""
    rank = dist.get_rank()
    for level in ("O1", "O2"):
        amp.reset()
        model = Numbers()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
        net = nn.parallel.DistributedDataParallel(model)
        for last in (False, False, True):
            with nullcontext() if last else net.no_sync():
                backward(net([1.0 + rank] * 3), optimizer, delay_unscale=not last)
        assert distinct(p.grad for p in amp.master_params(optimizer)) == [[4.5]] * 3, level
    amp.reset()


def _never_reduced() -> None:
    """An optimizer that steps under a disabled reduction still skips an overflow."""
    amp.reset()
    model = Numbers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    net = _wrap(model, delay_allreduce=True)
    net.disable_allreduce()
    backward(net([torch.tensor(float("inf"))] * 3), optimizer)
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 32768.0
    net.enable_allreduce()
    amp.reset()


def _outside_the_wrapper() -> None:
    """An inf in a parameter outside the wrapper, in a deferred context, is found by the deferred check."""
    amp.reset()
    model, loose = Numbers(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.5)
    amp.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0)
    net = _wrap(model)
    ones = [torch.tensor(1.0)] * 3
    with net.no_sync(), amp.scale_loss(net(ones) + (loose * float("inf")).sum(), optimizer) as loss:
        loss.backward()
    backward(net(ones), optimizer)
    assert optimizer._amp_stash.already_patched
    amp.reset()


def _construction() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))
    model[1].running_mean.fill_(rank)
    net = _wrap(model)
    assert all(name.startswith("module.") for name in net.state_dict())
    assert _equal_on_all_ranks(net.state_dict().values())
    assert net.module is model
    assert model.mask.tolist() == [True, False]
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), net):
        twin(torch.randn(4, 3)).pow(3).sum().backward()
        assert _equal_on_all_ranks([twin.module[0].weight.grad]), "a copy reduces too"
    net._compiled_call_impl = lambda rows: "the first model's"  # as compile() sets it
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert isinstance(twin(torch.randn(4, 3)), torch.Tensor), "a copy does not call the original"
    net._compiled_call_impl = None
    bare = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    bare.register_buffer("mask", torch.tensor([False, False]))
    bare.load_state_dict({name.removeprefix("module."): value for name, value in net.state_dict().items()})
    for error, options in (
        (ValueError, {"shared_param": True}),
        (ValueError, {"delay_allreduce": True, "num_allreduce_streams": 2}),
        (ValueError, {"delay_allreduce": True, "allreduce_trigger_params": list(model.parameters())}),
        (ValueError, {"allreduce_communicators": ([None], [None]), "num_allreduce_streams": 2}),
        (ValueError, {"allreduce_communicators": ([None, None], [None]), "num_allreduce_streams": 2}),
    ):
        with pytest.raises(error, match="Leave"):
            _wrap(model, **options)
    _wrap(model, allreduce_communicators=([None, None], [None, None]), num_allreduce_streams=2)
    with (
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
        pytest.raises(ValueError, match="0.weight.*gloo"),
    ):
        _wrap(model)
    net.module[0].weight.requires_grad_(False)
    net.zero_grad()
    net(torch.randn(4, 3)).sum().backward()
    assert net.module[0].weight.grad is None
    net.module[0].weight.requires_grad_(True)
    net(torch.randn(4, 3)).pow(2).sum().backward()
    assert _equal_on_all_ranks([net.module[0].weight.grad]), "a parameter unfrozen later is reduced"


def _changed_later() -> None:
    """Parameters that take the place of others are reduced, whatever put them there and whatever their shape."""
    rank = dist.get_rank()

    def replace(model):
        model[0] = nn.Linear(2, 2)

    def widen(model):
        model[0], model[1] = nn.Linear(2, 5), nn.Linear(5, 1)

    def assign(model):
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)

    for options, change in itertools.product(BOTH, (replace, widen, assign, nn.Module.double)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to(memory_format=torch.channels_last)
        net = _wrap(model, **options)
        net(torch.full((1, 2), 1.0 + rank)).sum().backward()
        change(model)
        net.zero_grad()
        x = torch.ones(1, 2, dtype=model[0].weight.dtype)
        net(x * (1.0 + rank)).sum().backward()
        expected = torch.autograd.grad(model(1.5 * x).sum(), model[0].weight)[0]
        assert torch.equal(model[0].weight.grad, expected), (options, change)
    net.to("meta")(torch.ones(1, 2, device="meta", dtype=torch.float64))
    assert {p.device.type for bucket in net._reducer.buckets for p in bucket.parameters} == {"meta"}


def _frozen_while_accumulating() -> None:
    """Local gradients stay local, and are reduced later, although the parameters change in between."""
    rank = dist.get_rank()
    numbers = [1.0 + rank, None if rank else 2.0, 4.0]
    scalings = {}, {"gradient_average": False}, {"gradient_average": False, "gradient_predivide_factor": 2.0}
    for options, extra in itertools.product(BOTH, scalings):
        net = _wrap(**options, **extra)
        factor = 0.5 / extra.get("gradient_predivide_factor", 1.0) * (1 if extra == {} else 2)
        net([2.0, 2.0, 2.0]).backward()
        reduced = 2.0 * 2 * factor
        with net.no_sync():
            net(numbers).backward()
            net.module.list[0].requires_grad_(False)
            net.module.list[1].requires_grad_(False)
            net([None, None, 1.0]).backward()
        net([None, None, 1.0]).backward()
        sums = [3.0, 2.0, 12.0]
        assert gradients(net) == [[reduced + factor * each] for each in sums], (options, extra)
        assert net.num_passes == 2
        net([None, None, 1.0]).backward()
        sums[2] += 2.0
        assert gradients(net) == [[reduced + factor * each] for each in sums], ("no longer held", options, extra)
        assert [flat.numel() for flat in net.allreduce_buffers] == [4], "only of the one that is not frozen"
    for level, options in itertools.product(("O0", "O1", "O2"), BOTH):
        amp.reset()
        model = Numbers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=64.0, verbosity=0)
        net = _wrap(model, **options)
        with net.no_sync():
            backward(net([torch.tensor(1.0 + rank)] * 3), optimizer)
        model.list[1].requires_grad_(False)
        backward(net([torch.tensor(1.0 + rank), None, None]), optimizer)
        assert distinct(p.grad for p in amp.master_params(optimizer)) == [[3.0], [1.5], [1.5]], (level, options)
        assert amp.state_dict()["loss_scaler0"]["unskipped"] == 2, "both contexts count"
    amp.reset()


def _body_that_raises_after_the_reduction() -> None:
    """What was accumulated locally before is kept, as reduced; which parameters that reached may differ by rank."""
    rank = dist.get_rank()
    for level, options in itertools.product(("O0", "O1", "O2", "O3"), BOTH):
        amp.reset()
        model = Numbers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=64.0, verbosity=0)
        net = _wrap(model, **options)
        one, two = torch.tensor(1.0), torch.tensor(2.0)
        with net.no_sync():
            backward(net([one, None, two] if rank else [one, two, None]), optimizer)
        with suppress(ZeroDivisionError), amp.scale_loss(net([one] * 3), optimizer) as loss:
            loss.backward()
            raise ZeroDivisionError
        masters = list(amp.master_params(optimizer))
        assert distinct(master.grad for master in masters) == [[1.0]] * 3, (level, options)
        assert all(master.grad.dtype is master.dtype for master in masters)
    amp.reset()


def _sparse_again_and_again() -> None:
    rank = dist.get_rank()
    for options in [*BOTH, {"retain_allreduce_buffers": True}, None]:
        model = nn.Embedding(5, 2, sparse=True)
        net = Reducer(model) if options is None else _wrap(model, **options)
        for times in (1, 2):
            (model if options is None else net)(torch.tensor([1, 3 if rank else 1])).sum().backward()
            if options is None:
                net.reduce()
            assert model.weight.grad[:, 0].tolist() == [0.0, 1.5 * times, 0.0, 0.5 * times, 0.0], (options, times)


class Table(nn.Module):
    """A sparse embedding, and a linear layer on its result, of the same weight if ``tied``."""

    def __init__(self, tied, sparse=True):
        super().__init__()
        self.table, self.linear = nn.Embedding(5, 2, sparse=sparse), nn.Linear(2, 5, bias=False)
        if tied:
            self.linear.weight = self.table.weight
        nn.init.ones_(self.table.weight)
        nn.init.ones_(self.linear.weight)

    def forward(self, rows, through_linear):
        x = torch.ones(1, 2) if rows is None else self.table(torch.tensor(rows))
        return (self.linear(x) if through_linear else x * self.linear.weight.detach()[0]).sum()


def _sparse_where_ranks_differ() -> None:
    """A rank's gradient of a table is sparse, dense (of a weight with a second use) or None; the sum is right."""
    rank = dist.get_rank()
    passes = [([1, 3], True), ([1], False), (None, True)]
    for options, tied, mine in itertools.product(BOTH, (False, True), itertools.product(passes, repeat=2)):
        if not tied and mine == (([1], False),) * 2:
            continue  # no rank reaches a dense parameter
        found = []
        for sparse in (True, False):
            net = _wrap(Table(tied, sparse), **options)
            for accumulated in (True, False):
                with net.no_sync() if accumulated else nullcontext():
                    net(*mine[rank]).backward()
            found.append([None if p.grad is None else p.grad.to_dense() for p in net.parameters()])
        for one, other in zip(*found, strict=True):
            if one is None or other is None:
                assert one is other or not (other if one is None else one).any(), (tied, mine)
            else:
                assert torch.equal(one, other), (options, tied, mine)


def _sparse() -> None:
    rank = dist.get_rank()
    for options in BOTH:
        model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1, bias=False))
        with torch.no_grad():
            model[1].weight.fill_(1.0)
        net = _wrap(model, **options)
        net(torch.tensor([1, 3 if rank else 1])).sum().backward()
        assert model[0].weight.grad[:, 0].tolist() == [0.0, 1.5, 0.0, 0.5, 0.0]
        for level in ("O1", "O2"):
            amp.reset()
            model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1, bias=False))
            model[1].weight.requires_grad_(False).fill_(1.0)
            optimizer = torch.optim.SGD([model[0].weight], lr=1.0)
            amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
            net = _wrap(model, **options)
            for synchronized in (False, True):
                with nullcontext() if synchronized else net.no_sync():
                    loss = net(torch.tensor([1, 3 if rank else 1])).float().sum()
                    backward(loss, optimizer)
            gradient = next(amp.master_params(optimizer)).grad.to_dense()
            assert gradient[:, 0].tolist() == [0.0, 3.0, 0.0, 1.0, 0.0], level
        amp.reset()


def _reentrant_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    rank = dist.get_rank()
    for options in BOTH:
        torch.manual_seed(0)
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)

        class Net(nn.Module):
            def __init__(self, first=first, second=second):
                super().__init__()
                self.first, self.second = first, second

            def forward(self, x):
                return self.second(checkpoint(self.first, x, use_reentrant=True))

        net = _wrap(Net(), **options)
        batch = torch.randn(2, 4, 3)
        net(batch[rank].requires_grad_()).pow(2).mean().backward()
        found = first.weight.grad.clone()
        first.zero_grad()
        second(first(batch.flatten(0, 1))).pow(2).mean().backward(inputs=[first.weight])
        torch.testing.assert_close(found, first.weight.grad)


def _bucket_sizes(sizes=(3, 2, 4, 1), dtypes=(torch.float32,) * 4, triggers=(), **options):
    """Elements in each bucket of a model with parameters of ``sizes``."""
    model = Numbers(sizes, dtypes)
    if triggers:
        options["allreduce_trigger_params"] = [model.list[i] for i in triggers]
    net = _wrap(model, **options)
    net([1.0] * len(sizes)).backward()
    return [flat.numel() for flat in net.allreduce_buffers]


def _layout() -> None:
    """Grouping and timing of the gradients that are sent."""
    assert _bucket_sizes() == [10]
    assert _bucket_sizes(message_size=4) == [1 + 4, 2 + 3], "in reverse order, at least 4 elements each"
    assert _bucket_sizes(message_size=1) == [1, 4, 2, 3]
    assert _bucket_sizes(message_size=1, triggers=[1]) == [1 + 4 + 2, 3], "the remainder forms the last"
    mixed = (torch.float32, torch.float16, torch.float32, torch.float16)
    assert sorted(_bucket_sizes(dtypes=mixed)) == [2 + 1, 3 + 4], "one dtype per bucket"
    rank = dist.get_rank()
    for options, under_way in (({"message_size": 1}, True), ({}, False), ({"delay_allreduce": True}, False)):
        net = _wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), **options)
        sent = []
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            net.module[0].weight.register_hook(lambda _, sent=sent, spy=all_reduce: sent.append(spy.call_count))
            net(torch.full((1, 2), 1.0 + rank)).sum().backward()
        assert (sent[0] > 0) == under_way, "overlapped: the last layer is being sent when the first is reached"


def _gradients_of_images(lay_out, reduce, **options):
    """Gradients of a small convolutional model after ``lay_out(model)``, the strides of all copies, and the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, (1, 3)))
    lay_out(model)
    net = _wrap(model, **options) if reduce == "wrapper" else Reducer(model)
    torch.manual_seed(1 + dist.get_rank())
    strides = []

    def copy(targets, sources, *rest, plain=torch._foreach_copy_):
        strides.extend((t.stride(), s.stride()) for t, s in zip(targets, sources, strict=True))
        return plain(targets, sources, *rest)

    with mock.patch.object(torch, "_foreach_copy_", copy):
        for _ in range(2):
            (net if reduce == "wrapper" else model)(torch.randn(2, 3, 6, 6)).pow(2).sum().backward()
            if reduce != "wrapper":
                net.reduce()
    return model, strides, getattr(net, "allreduce_buffers", [])


def _channels_last() -> None:
    """Gradients lie in the buffers as in memory, unless the ranks' layouts differ."""

    def last(model):
        model.to(memory_format=torch.channels_last)

    def last_on_one(model):
        model.to(memory_format=torch.channels_last if dist.get_rank() else torch.contiguous_format)

    ways = [
        ("wrapper", {**options, "retain_allreduce_buffers": retain}) for options in BOTH for retain in (True, False)
    ]
    for reduce, options in [*ways, ("reducer", {})]:
        expected = [p.grad for p in _gradients_of_images(lambda model: None, reduce, **options)[0].parameters()]
        for lay_out in (last, last_on_one):
            model, strides, buffers = _gradients_of_images(lay_out, reduce, **options)
            assert strides
            for parameter, other in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, other)
                if lay_out is last:
                    assert parameter.grad.stride() == parameter.stride()
            if lay_out is last:
                assert all(one == two for one, two in strides), "copied as one kernel, without transposition"
                assert not model[0].weight.is_contiguous()
            if options.get("retain_allreduce_buffers"):
                places = {buffer.untyped_storage().data_ptr() for buffer in buffers}
                assert all(p.grad.untyped_storage().data_ptr() in places for p in model.parameters()), "they are views"


@pytest.mark.host
def test_pieces_without_overlap_are_larger_on_a_gpu():
    assert buckets.piece_size([torch.ones(2)]) == buckets.piece_size([]) == 1_000_000
    with FakeTensorMode():
        for dtype, size in ((torch.float32, 4), (torch.float16, 2)):
            weights = [torch.empty(1_000_000, dtype=dtype, device="cuda:0") for _ in range(40)]
            pieces = buckets.make_buckets(weights, range(40), buckets.piece_size(weights), fp32=False)
            per_piece = -(-(25 << 20) // (1_000_000 * size))
            assert [len(piece.indices) for piece in pieces[:-1]] == [per_piece] * (len(pieces) - 1)


def _race_condition() -> None:
    """Two large parameters, one bucket each, ten passes without a pause: every sum belongs to its own pass."""
    model = Numbers(sizes=(1 << 18,) * 2, dtypes=(torch.float32,) * 2)
    net = _wrap(model, message_size=1, allreduce_trigger_params=list(model.parameters()), num_allreduce_streams=3)
    for i in range(10):
        net.zero_grad()
        net([float(i + dist.get_rank()), 2.0 * i]).backward()
        assert gradients(net) == [[i + 0.5], [2.0 * i]]
    assert len(net.allreduce_buffers) == 2


def _all_on_two_ranks() -> None:
    for body in (
        _averages,
        _dtypes,
        _unused,
        _several_backwards,
        _local_overflow,
        _views_of_buffers,
        _no_sync_of_torch,
        _never_reduced,
        _outside_the_wrapper,
        _construction,
        _changed_later,
        _frozen_while_accumulating,
        _body_that_raises_after_the_reduction,
        _sparse_again_and_again,
        _sparse_where_ranks_differ,
        _either_order,
        _layout,
        _channels_last,
        _race_condition,
        _sparse,
        _reentrant_checkpoint,
    ):
        torch.manual_seed(0)
        body()
        dist.barrier()


@pytest.mark.contract("5.1.1", "5.1.2", "5.1.3", "5.1.4", "5.1.5", "5.1.6", "5.1.7", "6.4.ddp_race_condition")
@pytest.mark.contract("10.3", "10.4", "10.5", "10.6", "10.9", "10.17")
def test_two_ranks():
    run_ranks(2, _all_on_two_ranks, timeout_s=240)


def _three_ranks() -> None:
    rank = dist.get_rank()
    numbers = [3.0 if rank == i else None for i in range(3)]
    for options in BOTH:
        net = _wrap(**options)
        net(numbers).backward()
        assert gradients(net) == [[1.0]] * 3
    model = Numbers()
    reducer = Reducer(model)
    model(numbers).backward()
    reducer.reduce()
    assert gradients(model) == [[1.0]] * 3


@pytest.mark.contract("5.1.2", "5.1.3", "5.2", "10.4")
def test_parameters_used_on_one_of_three_ranks():
    run_ranks(3, _three_ranks, timeout_s=60)


def _alone() -> None:
    net = _wrap()
    net([1.0, None, 2.0]).backward()
    assert gradients(net) == [[1.0], None, [2.0]]
    assert net.allreduce_buffers == [], "one process copies nothing"
    with net.no_sync():
        net([1.0, None, 2.0]).backward()
    before = gradients(net)
    Reducer(net.module).reduce()
    assert gradients(net) == before


@pytest.mark.contract("5.1.1", "5.2")
def test_world_of_one():
    run_ranks(1, _alone)


@pytest.mark.contract("5.1.1", "5.2")
@pytest.mark.parametrize("kind", [DistributedDataParallel, Reducer])
def test_without_a_process_group(kind):
    with pytest.raises(ValueError, match="init_process_group"):
        kind(nn.Linear(1, 1))


def test_what_was_set_aside_for_an_optimizer_that_is_gone_is_not_withdrawn_by_another():
    parameter = torch.zeros(2, requires_grad=True)
    scaling = buckets.Scaling(2, average=True, predivide=1.0)
    reducer = BackwardReducer([parameter], scaling, message_size=1, overlap=False)
    reducer.holds_local = True
    stash = AmpStash(master_weights=True)
    announce_aside(stash, [parameter])
    del stash
    for _ in range(100):  # one of them may be where the first was in memory
        withdraw_aside(AmpStash(master_weights=True))
    assert reducer.asides
