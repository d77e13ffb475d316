"""SyncBatchNorm on real gloo ranks, against batch norm in float64 over the whole batch; conversion; process groups."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from harness.apex import amp
from harness.apex.parallel import (
    DistributedDataParallel,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)
from tests.apex.shared import same, train_step
from tests.ranks import run_ranks

pytestmark = pytest.mark.contract("5.3")

C = 3
SHAPES = {2: (), 3: (5,), 4: (4, 5), 5: (2, 3, 2)}
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
PARAMETERS = {"weight": [0.5, -1.5, 2.0], "bias": [0.1, 0.0, -0.3]}


def _set(module: nn.Module) -> nn.Module:
    """The same weights everywhere, in the module's own dtype."""
    with torch.no_grad():
        for name, values in PARAMETERS.items():
            if getattr(module, name) is not None:
                getattr(module, name).copy_(torch.tensor(values))
    return module


def _close(found, expected, rtol=1e-5, atol=1e-5):
    torch.testing.assert_close(found.detach().double().cpu(), expected.detach().double(), rtol=rtol, atol=atol)


def _close_statistics(sbn, reference, rtol=1e-5, atol=1e-5):
    for name in ("running_mean", "running_var"):
        if getattr(sbn, name) is not None:
            _close(getattr(sbn, name), getattr(reference, name), rtol, atol)


def _reference(x, loss_weights, z=None, relu=False, **options):
    """Batch norm over all of ``x`` in float64: the module, its result, the gradient of ``x``."""
    bn = _set(PLAIN[x.dim()](C, **options).double())
    x = x.detach().double().clone().requires_grad_()
    out = bn(x)
    if z is not None:
        out = out + z.detach().double()
    out = out.relu() if relu else out
    (out * loss_weights.double()).sum().backward()
    return bn, out.detach(), x.grad


def _data(dims: int, counts: list[int], offset: float = 2.0):
    """The whole batch, the weight of each element of the result in the loss, and this rank's rows of both."""
    generator = torch.Generator().manual_seed(dims)
    shape = (sum(counts), C, *SHAPES[dims])
    x = torch.randn(shape, generator=generator) * torch.linspace(1, 3, C).view(1, C, *[1] * (dims - 2)) + offset
    weights = torch.randn(shape, generator=generator)
    rank = dist.get_rank()
    return x, weights, slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def _summed(tensor, group=None):
    total = tensor.detach().double().clone()
    dist.all_reduce(total, group=group)
    return total


def _check(sbn, x, weights, rows, *, rtol=2e-6, z=None, relu=False, **options):
    """Compare one training step of ``sbn`` on ``rows`` of ``x`` with the whole batch."""
    reference, expected, expected_grad = _reference(x, weights, z, relu, **options)
    mine = x[rows].clone().requires_grad_()
    out = sbn(mine) if z is None else sbn(mine, z[rows])
    (out.double() * weights[rows]).sum().backward()
    assert out.dtype is mine.grad.dtype is x.dtype
    _close(out, expected[rows], rtol, rtol * 10)
    _close(mine.grad, expected_grad[rows], rtol, rtol * 10)
    for name in PARAMETERS:
        if (parameter := getattr(sbn, name)) is not None:
            assert parameter.grad.dtype is parameter.dtype
            _close(_summed(parameter.grad), getattr(reference, name).grad, rtol, rtol * len(x))
    _close_statistics(sbn, reference, rtol, rtol * 10)


def _equals_the_whole_batch() -> None:
    for counts in [[4, 4], [5, 1], [1, 2], [6, 0], [0, 3], [1, 1]]:
        for dims in SHAPES:
            x, weights, rows = _data(dims, counts)
            _check(_set(SyncBatchNorm(C)), x, weights, rows)
            _check(_set(SyncBatchNorm(C).double()), x.double(), weights.double(), rows, rtol=1e-12)
    x, weights, rows = _data(4, [5, 1])
    for options in (
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.5},
        {"momentum": 0.7},
        {"momentum": None},
        {"affine": False, "track_running_stats": False},
    ):
        _check(_set(SyncBatchNorm(C, **options)), x, weights, rows, **options)


def _numerically_stable() -> None:
    """At a mean of 1000 standard deviations E[x^2] - E[x]^2 in float32 has no correct digit."""
    x, _, rows = _data(4, [7, 2], offset=2000.0)
    half = (torch.randn(4, C, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.5 + 300).half()
    for whole, mine in ((x, x[rows]), (half, half[:1] if dist.get_rank() == 0 else half[1:])):
        sbn = _set(SyncBatchNorm(C))
        sbn(mine)
        _close((sbn.running_var.double() - 0.9) / 0.1, whole.double().var((0, 2, 3)), 1e-4, 1e-4)


def _dtypes() -> None:
    for dtype, rtol in ((torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)):
        for parameters in (torch.float32, dtype):
            for options in ({}, {"affine": False}):
                for dims, counts in ((4, [5, 1]), (2, [9, 3]), (4, [6, 0])):
                    x, weights, rows = _data(dims, counts, offset=0.5)
                    sbn = _set(SyncBatchNorm(C, **options).to(parameters))
                    _check(sbn, x.to(dtype), weights.to(dtype).float(), rows, rtol=rtol, **options)
    x, weights, rows = _data(4, [5, 1])
    _check(_set(SyncBatchNorm(C).half()), x, weights, rows, rtol=2e-3)  # float32 input of a float16 layer
    with torch.autocast("cpu", torch.bfloat16):
        out = SyncBatchNorm(C)(x[rows].bfloat16().requires_grad_())
        assert out.dtype is torch.bfloat16
        out.sum().backward()
        _check(_set(SyncBatchNorm(C)), x, weights, rows)


def _cumulative_average() -> None:
    sbn, bn = SyncBatchNorm(C, momentum=None), nn.BatchNorm2d(C, momentum=None).double()
    for seed in range(3):
        x, _, rows = _data(4, [3, 1], offset=seed)
        sbn(x[rows])
        bn(x.double())
    _close_statistics(sbn, bn)
    assert sbn.num_batches_tracked.item() == 3


def _z_and_relu() -> None:
    for counts in ([4, 2], [4, 0]):
        x, weights, rows = _data(4, counts)
        z = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
        _check(_set(SyncBatchNorm(C, fuse_relu=True)), x, weights, rows, relu=True)
        _check(_set(SyncBatchNorm(C, fuse_relu=True)), x, weights, rows, relu=True, z=z)
        mine = z.clone().requires_grad_()
        _check(_set(SyncBatchNorm(C)), x, weights, rows, z=mine)
        assert torch.equal(mine.grad[rows], weights[rows])


def _channel_last() -> None:
    for dims in SHAPES:
        x, weights, rows = _data(dims, [5, 1])
        first, last = _set(SyncBatchNorm(C, fuse_relu=True)), _set(SyncBatchNorm(C, fuse_relu=True))
        last._specify_channel_last(True)
        a = x[rows].clone().requires_grad_()
        b = x[rows].movedim(1, -1).contiguous().requires_grad_()
        z = weights[rows].flip(0)
        out_a, out_b = first(a, z), last(b, z.movedim(1, -1))
        assert out_b.shape == b.shape
        assert out_b.is_contiguous()
        (out_a * weights[rows]).sum().backward()
        (out_b * weights[rows].movedim(1, -1)).sum().backward()
        _close(out_b.movedim(-1, 1), out_a)
        _close(b.grad.movedim(-1, 1), a.grad)
        _close(last.weight.grad, first.weight.grad)
        last.eval()
        first.eval()
        _close(last(b, z.movedim(1, -1)).movedim(-1, 1), first(a, z))
    for dims, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        x, weights, rows = _data(dims, [5, 2])
        mine = x[rows].contiguous(memory_format=memory_format).requires_grad_()
        assert _set(SyncBatchNorm(C))(mine).is_contiguous(memory_format=memory_format)
        _check(_set(SyncBatchNorm(C)), x.contiguous(memory_format=memory_format), weights, rows)
        with pytest.raises(ValueError, match="channels_last memory format"):
            SyncBatchNorm(C, channel_last=True)(mine)


def _twice_in_one_graph() -> None:
    x, weights, rows = _data(4, [5, 1])
    sbn, bn = _set(SyncBatchNorm(C)), _set(nn.BatchNorm2d(C).double())
    mine, whole = x[rows].clone().requires_grad_(), x.double().requires_grad_()
    (sbn(sbn(mine) * 2 + mine) * weights[rows]).sum().backward()
    (bn(bn(whole) * 2 + whole) * weights).sum().backward()
    _close(mine.grad, whole.grad[rows], 1e-4)
    _close(_summed(sbn.weight.grad), bn.weight.grad, 1e-4, 1e-4)
    _close_statistics(sbn, bn)


def _gradients_not_needed() -> None:
    rank = dist.get_rank()
    x, weights, rows = _data(4, [5, 1])
    reference, expected, expected_grad = _reference(x, weights)
    with torch.no_grad():
        _close(_set(SyncBatchNorm(C))(x[rows]), expected[rows])
    # Input that needs a gradient on one rank only: both ranks must run the backward collective.
    sbn = _set(SyncBatchNorm(C))
    mine = x[rows].clone().requires_grad_(rank == 0)
    (sbn(mine) * weights[rows]).sum().backward()
    _close(_summed(sbn.weight.grad), reference.weight.grad, atol=1e-4)
    if rank == 0:
        _close(mine.grad, expected_grad[rows])
    # a frozen weight, a view, an expanded gradient
    sbn = SyncBatchNorm(C)
    sbn.weight.requires_grad_(False)
    mine = x[rows].clone().requires_grad_()
    sbn(mine.transpose(2, 3)).sum().backward()
    _close(mine.grad, torch.zeros_like(mine), atol=1e-4)
    assert sbn.weight.grad is None


def _one_collective_each_way() -> None:
    gathering = mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor)
    reducing = mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)
    with gathering as gathers, reducing as reduces:
        SyncBatchNorm(C)(torch.randn(4, C, requires_grad=True)).sum().backward()
    assert (gathers.call_count, reduces.call_count) == (1, 1)


def _evaluation() -> None:
    """Evaluation never communicates: the ranks do different things here, and would hang if it did."""
    x = torch.randn(4, C, 2, 2)
    for options in ({}, {"track_running_stats": False}, {"fuse_relu": True}):
        sbn = _set(SyncBatchNorm(C, **options)).eval()
        bn = _set(nn.BatchNorm2d(C, track_running_stats=sbn.track_running_stats)).eval()
        if dist.get_rank() == 0:
            z = torch.randn_like(x)
            _close(sbn(x, z), (bn(x) + z).relu() if sbn.fuse_relu else bn(x) + z)
            _close(sbn(x[:1]), bn(x[:1]).relu() if sbn.fuse_relu else bn(x[:1]))


def _too_few_values() -> None:
    rank = dist.get_rank()
    for mine in ((1, C, 1, 1) if rank == 0 else (0, C, 1, 1), (0, C, 3, 3) if rank == 0 else (1, C, 1, 1)):
        sbn = SyncBatchNorm(C)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            sbn(torch.ones(mine))
        assert sbn.num_batches_tracked.item() == 0
    # empty on every rank: nothing changes, and nothing hangs
    sbn = SyncBatchNorm(C)
    x = torch.ones(0, C, 3, 3, requires_grad=True)
    out = sbn(x)
    out.sum().backward()
    assert out.shape == x.grad.shape == x.shape
    assert sbn.running_mean.tolist() == [0.0] * C
    assert sbn.running_var.tolist() == [1.0] * C
    with pytest.raises(ValueError, match=r"\(batch, 3, \.\.\.\); got \(2, 4\)"):
        sbn(torch.ones(2, 4))
    with pytest.raises(ValueError, match="channel_last"):
        sbn(torch.ones(3))


def _groups() -> None:
    rank = dist.get_rank()
    x, weights, rows = _data(4, [3, 2])
    alone = create_syncbn_process_group(1)
    sbn, bn = _set(SyncBatchNorm(C, process_group=alone)), _set(nn.BatchNorm2d(C))
    _close(sbn(x[rows]), bn(x[rows]))
    twin = copy.deepcopy(sbn)
    assert twin.process_group is alone
    assert twin.weight is not sbn.weight
    sbn._specify_process_group(create_syncbn_process_group(2))
    sbn.reset_running_stats()
    _check(sbn, x, weights, rows)
    with pytest.raises(ValueError, match="0 .all ranks together. or one of 1, 2"):
        create_syncbn_process_group(3)
    first_only = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="not in the process group"):
            SyncBatchNorm(C, process_group=first_only)(x)


def _all_on_two_ranks() -> None:
    for body in (
        _equals_the_whole_batch,
        _numerically_stable,
        _dtypes,
        _cumulative_average,
        _z_and_relu,
        _channel_last,
        _twice_in_one_graph,
        _gradients_not_needed,
        _one_collective_each_way,
        _evaluation,
        _too_few_values,
        _groups,
    ):
        torch.manual_seed(0)
        body()
        dist.barrier()


@pytest.mark.contract("10.16", "6.4.syncbn_two_ranks", "6.4.syncbn_batchnorm1d", "6.4.syncbn_different_batch_size")
def test_two_ranks_equal_batch_norm_on_the_whole_batch():
    run_ranks(2, _all_on_two_ranks, timeout_s=120)


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(2, C, 3), nn.BatchNorm2d(C), nn.Linear(C, 2)

    def forward(self, x):
        return self.head(functional.relu(self.bn(self.conv(x))).mean((2, 3)))


def _with_amp_and_ddp() -> None:
    """At each level three steps equal those of one process; overlapped reductions interleave with SyncBatchNorm."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 2, 6, 6, generator=generator) for _ in range(3)]
    targets = torch.randint(2, (8,), generator=generator)

    def train(level, distributed, delay=False):
        torch.manual_seed(0)
        amp.reset()
        model = convert_syncbn_model(_Net()) if distributed else _Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=16.0)
        net = DistributedDataParallel(model, delay_allreduce=delay, message_size=1) if distributed else model
        rows = slice(rank * 4, rank * 4 + 4) if distributed else slice(None)
        for batch in batches:
            loss = functional.cross_entropy(net(batch[rows]).float(), targets[rows])
            train_step(loss, optimizer)
        values = [p.detach().float() for p in amp.master_params(optimizer)]
        return [*values, model.bn.running_var.float()], model.bn.weight.dtype

    tolerances = {"O0": 1e-5, "O1": 5e-3, "O2": 5e-3, "O3": 1e-2, "O4": 4e-2, "O5": 4e-2}
    for level, tolerance in tolerances.items():
        expected, expected_dtype = train(level, False)
        for delay in (False, True):
            found, dtype = train(level, True, delay)
            assert dtype is expected_dtype, level
            assert (dtype is torch.float32) == (level != "O3"), level
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=level)
            for mine in found:
                first = mine.clone()
                dist.broadcast(first, 0)
                assert torch.equal(mine, first), level
    amp.reset()


@pytest.mark.contract("6.4.syncbn_two_ranks")
def test_training_equals_batch_norm_on_the_whole_batch_at_every_level():
    run_ranks(2, _with_amp_and_ddp, timeout_s=120)


def _four_ranks() -> None:
    """In groups of two, each pair of ranks normalizes as one, independent of the other pair."""
    rank = dist.get_rank()
    counts = [3, 1, 0, 4]
    x, weights, rows = _data(4, counts)
    group = create_syncbn_process_group(2)
    assert dist.get_process_group_ranks(group) == ([0, 1] if rank < 2 else [2, 3])
    block = slice(0, 4) if rank < 2 else slice(4, 8)
    bn, expected, expected_grad = _reference(x[block], weights[block])
    sbn = _set(convert_syncbn_model(nn.BatchNorm2d(C), process_group=group))
    mine = x[rows].clone().requires_grad_()
    out = sbn(mine)
    (out * weights[rows]).sum().backward()
    within = slice(rows.start - block.start, rows.stop - block.start)
    _close(out, expected[within])
    _close(mine.grad, expected_grad[within])
    _close_statistics(sbn, bn)
    _close(_summed(sbn.weight.grad, group), bn.weight.grad, atol=1e-4)
    _check(_set(SyncBatchNorm(C)), x, weights, rows)


@pytest.mark.contract("6.4.syncbn_groups")
def test_groups_of_two_on_four_ranks():
    run_ranks(4, _four_ranks, timeout_s=60)


def _one_cuda_rank() -> None:
    """Run the synchronized path itself, on a group of one: its kernels, on the device."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    with mock.patch.object(SyncBatchNorm, "_world_size", return_value=2):
        for dims in SHAPES:
            for memory_format in [torch.contiguous_format] + [torch.channels_last] * (dims == 4):
                for dtype, rtol in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)):
                    x, weights, _ = _data(dims, [6], offset=0.5)
                    reference, expected, expected_grad = _reference(x.to(dtype), weights.to(dtype))
                    sbn = _set(SyncBatchNorm(C)).cuda()
                    mine = x.to("cuda", dtype).contiguous(memory_format=memory_format).requires_grad_()
                    out = sbn(mine)
                    (out * weights.to("cuda", dtype)).sum().backward()
                    assert out.dtype is mine.grad.dtype is dtype
                    _close(out, expected, rtol, rtol * 10)
                    _close(mine.grad, expected_grad, rtol, rtol * 10)
                    _close(sbn.weight.grad, reference.weight.grad, rtol, rtol * 10)
                    _close(sbn.running_var, reference.running_var, rtol, rtol * 10)
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_cuda():
    run_ranks(1, _one_cuda_rank, group=False)


# One process, without a group


@pytest.mark.contract("6.4.syncbn_single", "6.4.syncbn_batchnorm1d")
@pytest.mark.parametrize("dims", SHAPES)
def test_without_a_group_it_is_batch_norm(dims):
    x = torch.randn(6, C, *SHAPES[dims])
    sbn, bn = _set(SyncBatchNorm(C)), _set(PLAIN[dims](C))
    for training in (True, False):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, expected = sbn.train(training)(a), bn.train(training)(b)
        (out * x).sum().backward()
        (expected * x).sum().backward()
        assert same([out, a.grad, sbn.weight.grad], [expected, b.grad, bn.weight.grad])
    assert list(sbn.state_dict()) == list(bn.state_dict())
    assert same(sbn.state_dict().values(), bn.state_dict().values())
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        sbn.train()(torch.ones(1, C, *[1] * (dims - 2)))
    last = SyncBatchNorm(C, channel_last=True)
    torch.testing.assert_close(last(x.movedim(1, -1)).movedim(-1, 1), SyncBatchNorm(C)(x))


def test_pickles_and_state_dicts_are_interchangeable_with_batch_norm():
    sbn = pickle.loads(pickle.dumps(_set(SyncBatchNorm(C, fuse_relu=True))))
    assert sbn.fuse_relu
    for other in (nn.BatchNorm2d(C), nn.SyncBatchNorm(C)):
        other.load_state_dict(sbn.state_dict())
        sbn.load_state_dict(other.state_dict())
        assert other.weight.tolist() == PARAMETERS["weight"]
    for name in ("process_group", "channel_last", "fuse_relu"):
        del sbn.__dict__[name]  # as in modules pickled by Apex without extensions
    assert sbn(torch.randn(4, C)).shape == (4, C)


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.BatchNorm1d(C)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(C, C), shared), nn.Sequential(shared, nn.BatchNorm2d(C))])
        self.instance = nn.InstanceNorm2d(C, affine=True, track_running_stats=True)
        self.torch_sync = nn.SyncBatchNorm(C, eps=0.25, momentum=0.75)
        self.plain = nn.BatchNorm3d(C, affine=False, momentum=None)
        self.untracked = nn.BatchNorm1d(C, track_running_stats=False)
        self.missing = None


@pytest.mark.contract("10.16")
def test_convert_replaces_every_batch_norm_and_keeps_its_settings():
    model = _Model()
    model.blocks[1][1].weight.requires_grad_(False)
    model.blocks[1][1].eval()
    model.plain.double()
    old = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters())
    before = copy.deepcopy(model.state_dict())
    assert convert_syncbn_model(model) is model
    new = dict(model.named_modules(remove_duplicate=False))
    assert list(new) == list(old)
    norms = [name for name, module in old.items() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 6
    for name, module in new.items():
        assert (type(module) is SyncBatchNorm) == (name in norms), name
        if name not in norms:
            assert module is old[name]
            continue
        was = old[name]
        for field in ("num_features", "eps", "momentum", "affine", "track_running_stats", "training"):
            assert getattr(module, field) == getattr(was, field), (name, field)
        assert module.running_mean is was.running_mean, "shared"
        assert module.num_batches_tracked is was.num_batches_tracked
    assert model.blocks[0][1] is model.blocks[1][0]
    assert model.blocks[1][1].weight.requires_grad is False
    assert model.blocks[1][1].bias.requires_grad is True
    assert model.plain.running_mean.dtype is torch.float64
    for name, parameter in model.named_parameters():
        assert (parameter is parameters[name]) == (name.startswith("instance") or "0.0" in name)
        assert torch.equal(parameter, parameters[name])
    assert list(model.state_dict()) == list(before)
    assert same(model.state_dict().values(), before.values())
    with torch.no_grad():
        model.torch_sync.weight.add_(1.0)
    assert old["torch_sync"].weight.tolist() == [1.0] * C, "a copy"


def test_convert_the_root_with_its_hooks():
    bn = nn.BatchNorm1d(C)
    seen = []
    handle = bn.register_forward_hook(lambda module, *_: seen.append(module))
    sbn = convert_syncbn_model(bn, channel_last=True)
    assert type(sbn) is SyncBatchNorm
    assert sbn.channel_last
    sbn(torch.randn(4, C))
    assert seen == [sbn]
    handle.remove()
    sbn(torch.randn(4, C))
    assert len(seen) == 1
    assert convert_syncbn_model(SyncBatchNorm(C, fuse_relu=True)).fuse_relu


def test_convert_keeps_tied_weights():
    tied = nn.Sequential(nn.BatchNorm1d(C), nn.BatchNorm1d(C))
    tied[1].weight = tied[0].weight
    convert_syncbn_model(tied)
    assert tied[1].weight is tied[0].weight
    assert tied[1].bias is not tied[0].bias


class _WithActivation(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def test_convert_warns_about_what_it_cannot_keep():
    with pytest.warns(UserWarning, match="_WithActivation"):
        convert_syncbn_model(nn.Sequential(_WithActivation(C)))
    with pytest.raises(TypeError, match="Run the model once"):
        convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm2d()))


def test_group_size_zero_needs_no_process_group():
    assert create_syncbn_process_group(0) is None
