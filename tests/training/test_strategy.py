"""What the loop is given to call under each strategy, and when gradients cross ranks."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn

from harness.config.schema import LarcSection, ParallelSection, PrecisionSection
from harness.errors import ConfigError
from harness.training import strategy as parallel
from harness.training.precision import choose
from harness.training.strategy import Parallel, check_world, wrap
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def ours():
    return choose(PrecisionSection(opt_level="O0"), CPU)


@pytest.mark.parametrize("strategy", ["none", "dp"])
def test_one_process_only(strategy):
    check_world(ParallelSection(strategy=strategy), 1)
    with pytest.raises(ConfigError, match="one process, but there are 2 processes\n  -> use parallel.strategy=ddp"):
        check_world(ParallelSection(strategy=strategy), 2)


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp", "dp"])
def test_one_process_with_one_device_is_the_plain_model(strategy):
    model = nn.Linear(2, 2)
    section = ParallelSection(strategy=strategy, sync_batchnorm=strategy in ("ddp", "fsdp"))
    assert parallel.prepare(model, section, ours(), CPU, 1) is model
    replicas = wrap(model, section, ours(), CPU, 1)
    assert replicas.model is replicas.module is replicas.evaluated is model
    assert not replicas.sharded
    assert isinstance(replicas.reduce_when(False), nullcontext)


def test_one_device_is_told(caplog):
    wrap(nn.Linear(2, 2), ParallelSection(strategy="dp"), ours(), CPU, 1)
    assert caplog.messages == ["parallel.strategy=dp found one device (cpu): the model runs there, as with none"]


def test_several_devices_share_training_and_evaluation(monkeypatch):
    """That it is put together so; DataParallel itself runs on CUDA machines only."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    model = nn.Linear(2, 2)
    replicas = wrap(model, ParallelSection(strategy="dp"), ours(), torch.device("cuda", 0), 1)
    assert isinstance(replicas.model, nn.DataParallel)
    assert replicas.evaluated is replicas.model
    assert replicas.module is model
    assert replicas.strategy == "dp on 2 devices"
    with replicas.reduce_when(False):
        pass


def test_what_the_context_of_a_micro_batch_switches():
    switched, norm = [], nn.Identity()
    norm.idle = False
    model = nn.Linear(1, 1)
    replicas = Parallel(model, model, "test", reduces=switched.append, synchronized=(norm,))
    assert isinstance(replicas.reduce_when(True), nullcontext)  # what every step of a full batch does
    with replicas.reduce_when(False):
        assert (switched, norm.idle) == ([False], False)
    with replicas.reduce_when(True, counts=False):
        assert norm.idle
    assert (switched, norm.idle) == ([False, True, True, True], False)
    with suppress(ZeroDivisionError), replicas.reduce_when(False, counts=False):
        raise ZeroDivisionError
    assert (switched[-1], norm.idle) == (True, False)


def _idle_rank(idle_rows):
    """Gradients and statistics of 4 rows on rank 0; the ``idle_rows`` of rank 1 count for nothing."""
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    rows = torch.randn(4, 3)
    section = ParallelSection(sync_batchnorm=True)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    model = parallel.prepare(model, section, ours(), CPU, 2)
    replicas = wrap(model, section, ours(), CPU, 2)
    assert len(replicas.synchronized) == 1
    inputs = rows if rank == 0 else torch.full((idle_rows, 3), 7.0)
    weight = 2.0 if rank == 0 else 0.0  # of world size 2, all rows on one rank
    with replicas.reduce_when(True, counts=rank == 0):
        (replicas.model(inputs).square().mean() * weight).backward()
    return [p.grad.tolist() for p in model.parameters()], [b.tolist() for b in model.buffers()]


def _plain():
    torch.manual_seed(0)
    rows = torch.randn(4, 3)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    model(rows).square().mean().backward()
    return [p.grad for p in model.parameters()], list(model.buffers())


def test_rows_that_only_keep_a_rank_in_step_change_nothing():
    """Statistics and gradients of batch norm over ranks are those of the rows that count, on one process."""
    expected = _plain()
    for found in run_ranks(2, _idle_rank, 2):
        for mine, theirs in zip(found, expected, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(torch.tensor(one), other, atol=1e-6, rtol=1e-5)


def test_layer_wise_rates_go_around_the_optimizer_before_amp():
    amp = choose(PrecisionSection(opt_level="O1", loss_scale=8.0), CPU)
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = amp.larc(inner, LarcSection(trust_coefficient=0.001, clip=False))
    assert (optimizer.trust_coefficient, optimizer.clip, optimizer.eps) == (0.001, False, 1e-8)
    before = model.weight.detach().clone()
    model, optimizer = amp.initialize(model, optimizer)
    optimizer.param_groups[0]["lr"] = 1.0  # as the schedule does
    with amp.scale_loss(model(torch.ones(3, 2)).float().square().mean(), optimizer, delay_unscale=False) as scaled:
        scaled.backward()
    optimizer.step()
    # LARS: each parameter moves by lr x trust_coefficient of its own norm
    moved = (model.weight.detach() - before).norm() / before.norm()
    assert moved.item() == pytest.approx(0.001, rel=1e-3)
