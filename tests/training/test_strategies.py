"""The model that the loop calls under each strategy, and when gradients are averaged over ranks."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.apex import amp
from harness.apex.parallel import DistributedDataParallel
from harness.config.schema import LarcSection, ParallelSection, PrecisionSection
from harness.distributed.launch_env import Launch
from harness.distributed.runtime import Runtime
from harness.errors import ConfigError
from harness.training.optimizer.precision import choose
from harness.training.reproducibility.logical_ranks import LogicalRanks
from harness.training.strategies.base import ParallelStrategy, strategy_class
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def made(section: ParallelSection, world_size: int, device: torch.device = CPU) -> ParallelStrategy:
    ranks = LogicalRanks(Runtime(Launch(world_size=world_size), device))
    return strategy_class(section)(section, choose(PrecisionSection(opt_level="O0"), CPU), ranks)


def rows(number: int) -> SimpleNamespace:
    """A micro-batch of rank 0 with so many rows."""
    return SimpleNamespace(rank=0, num_rows=number)


@pytest.mark.parametrize("name", ["none", "dp"])
def test_strategy_for_one_process(name):
    section = ParallelSection(strategy=name)
    strategy_class(section).check_world(section, 1)
    with pytest.raises(ConfigError, match="runs in one process, but 2 were started\n  -> use parallel.strategy=ddp"):
        strategy_class(section).check_world(section, 2)


@pytest.mark.parametrize("name", ["none", "ddp", "fsdp", "dp"])
def test_one_process_with_one_device_uses_the_bare_model(name, caplog):
    model = nn.Linear(2, 2)
    section = ParallelSection(strategy=name, sync_batchnorm=name in ("ddp", "fsdp"))
    parallel = made(section, 1)
    assert parallel.prepare(model) is model
    parallel.wrap(model)
    assert parallel.model is parallel.module is parallel.eval_model is model
    assert not parallel.holds_shard
    expected = (
        ["parallel.strategy=dp found only one device (cpu), so it acts as parallel.strategy=none"]
        if name == "dp"
        else []
    )
    assert caplog.messages == expected


def test_dp_on_several_devices(monkeypatch):
    """DataParallel is constructed correctly; running it needs CUDA."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    model = nn.Linear(2, 2)
    parallel = made(ParallelSection(strategy="dp"), 1, torch.device("cuda", 0))
    parallel.wrap(model)
    assert isinstance(parallel.model, nn.DataParallel)
    assert parallel.eval_model is parallel.model
    assert parallel.module is model
    assert parallel.describe() == "dp on 2 devices"
    parallel.model.device_ids = [0, 1]  # as it finds with CUDA
    assert parallel.devices() == [torch.device("cuda", 0), torch.device("cuda", 1)]
    other = made(ParallelSection(strategy="none"), 1, torch.device("cuda", 1))
    assert other.devices() == [torch.device("cuda", 1)]
    with parallel.micro_batch(rows(4), False):
        pass


def test_micro_batches_switch_the_exchange_and_batch_norms():
    switched, norm = [], nn.Identity()
    norm.idle = False
    parallel = made(ParallelSection(), 2)
    parallel.switch_sync, parallel.exchanges, parallel.sync_norms = switched.append, True, (norm,)
    parallel._num_passes = lambda: None
    with parallel.micro_batch(rows(4), True):  # the step of a full batch
        assert (switched, norm.idle) == ([], False)
    with parallel.micro_batch(rows(4), False):
        assert (switched, norm.idle) == ([False], False)
    with parallel.micro_batch(rows(0), True):
        assert norm.idle
    assert (switched, norm.idle) == ([False, True], False)
    with suppress(ZeroDivisionError), parallel.micro_batch(rows(0), False):
        raise ZeroDivisionError
    assert (switched[-1], norm.idle) == (True, False)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def _idle_rank(sync):
    """The gradients and statistics of 4 rows on rank 0, while the rows of rank 1 do not count."""
    rank, parallel = torch.distributed.get_rank(), made(ParallelSection(sync_batchnorm=sync), 2)
    model = parallel.prepare(network())
    parallel.wrap(model)
    assert len(parallel.sync_norms) == sync
    assert isinstance(parallel.model, DistributedDataParallel)  # torch's rebuilds its buckets after the first step
    inputs = torch.randn(4, 3) if rank == 0 else torch.full((2, 3), 7.0)
    weight = 2.0 if rank == 0 else 0.0  # the world size, as all rows are on one rank
    with parallel.micro_batch(rows(4 if rank == 0 else 0), True):
        (parallel.model(inputs).square().mean() * weight).backward()
    return [p.grad.tolist() for p in model.parameters()], [b.tolist() for b in model.buffers()]


@pytest.mark.parametrize("sync", [True, False])
def test_rows_that_do_not_count_change_nothing(sync):
    amp.reset()  # a run in an earlier test of this process may have left the casts of O1 on
    model = network()
    fresh = [buffer.clone() for buffer in model.buffers()]
    model(torch.randn(4, 3)).square().mean().backward()
    gradients, statistics = [p.grad for p in model.parameters()], list(model.buffers())
    for rank, found in enumerate(run_ranks(2, _idle_rank, sync)):
        expected = gradients, statistics if sync or rank == 0 else fresh
        for mine, theirs in zip(found, expected, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(torch.tensor(one), other, atol=1e-6, rtol=1e-5)


def test_larc_wraps_the_optimizer_before_amp():
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
    # LARS moves each parameter by lr x trust_coefficient of its own norm.
    moved = (model.weight.detach() - before).norm() / before.norm()
    assert moved.item() == pytest.approx(0.001, rel=1e-3)
