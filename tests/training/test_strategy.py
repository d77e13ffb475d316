"""The model that the loop calls under each strategy, and when gradients are averaged over ranks."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import nn

from harness.apex import amp
from harness.config.schema import LarcSection, ParallelSection, PrecisionSection
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import ConfigError
from harness.runs.run_dir import RunFolder
from harness.training import build, strategy
from harness.training.precision import choose
from harness.training.strategy import ParallelModel
from tests.fixtures import make_config, write_rows
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def ours():
    return choose(PrecisionSection(opt_level="O0"), CPU)


@pytest.mark.parametrize("name", ["none", "dp"])
def test_strategy_for_one_process(name):
    strategy.check_world(ParallelSection(strategy=name), 1)
    with pytest.raises(ConfigError, match="runs in one process, but 2 were started\n  -> use parallel.strategy=ddp"):
        strategy.check_world(ParallelSection(strategy=name), 2)


@pytest.mark.parametrize("name", ["none", "ddp", "fsdp", "dp"])
def test_one_process_with_one_device_uses_the_bare_model(name, caplog):
    model = nn.Linear(2, 2)
    section = ParallelSection(strategy=name, sync_batchnorm=name in ("ddp", "fsdp"))
    assert strategy.prepare(model, section, ours(), CPU, 1) is model
    parallel = strategy.wrap(model, section, ours(), CPU, 1)
    assert parallel.model is parallel.module is parallel.evaluated is model
    assert not parallel.sharded
    assert isinstance(parallel.sync_gradients(False), nullcontext)
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
    parallel = strategy.wrap(model, ParallelSection(strategy="dp"), ours(), torch.device("cuda", 0), 1)
    assert isinstance(parallel.model, nn.DataParallel)
    assert parallel.evaluated is parallel.model
    assert parallel.module is model
    assert parallel.strategy == "dp on 2 devices"
    with parallel.sync_gradients(False):
        pass


def test_micro_batches_switch_the_exchange_and_batch_norms():
    switched, norm = [], nn.Identity()
    norm.idle = False
    model = nn.Linear(1, 1)
    parallel = ParallelModel(model, model, "test", switch_sync=switched.append, sync_norms=(norm,))
    assert isinstance(parallel.sync_gradients(True), nullcontext)  # the step of a full batch
    with parallel.sync_gradients(False):
        assert (switched, norm.idle) == ([False], False)
    with parallel.sync_gradients(True, counts=False):
        assert norm.idle
    assert (switched, norm.idle) == ([False, True, True, True], False)
    with suppress(ZeroDivisionError), parallel.sync_gradients(False, counts=False):
        raise ZeroDivisionError
    assert (switched[-1], norm.idle) == (True, False)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def _idle_rank():
    """The gradients and statistics of 4 rows on rank 0, while the rows of rank 1 do not count."""
    rank, section = torch.distributed.get_rank(), ParallelSection(sync_batchnorm=True)
    model = strategy.prepare(network(), section, ours(), CPU, 2)
    parallel = strategy.wrap(model, section, ours(), CPU, 2)
    assert len(parallel.sync_norms) == 1
    inputs = torch.randn(4, 3) if rank == 0 else torch.full((2, 3), 7.0)
    weight = 2.0 if rank == 0 else 0.0  # the world size, as all rows are on one rank
    with parallel.sync_gradients(True, counts=rank == 0):
        (parallel.model(inputs).square().mean() * weight).backward()
    return [p.grad.tolist() for p in model.parameters()], [b.tolist() for b in model.buffers()]


def test_rows_that_do_not_count_change_nothing():
    amp.reset()  # a run in an earlier test of this process may have left the casts of O1 on
    model = network()
    model(torch.randn(4, 3)).square().mean().backward()
    expected = [p.grad for p in model.parameters()], list(model.buffers())
    for found in run_ranks(2, _idle_rank):
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


class Mixed(nn.Module):
    """A convolution, a batch norm and a transformer's layer; (batch, 1, 4, 4) -> (batch, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU())
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(128, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.features(images).flatten(2)).flatten(1))


@pytest.mark.parametrize(("setting", "mode"), [("true", None), ("reduce-overhead",) * 2, ("max-autotune",) * 2])
def test_model_compile_is_the_mode_of_torch_compile(tmp_path, monkeypatch, setting, mode):
    write_rows(tmp_path, "train", 16)
    write_rows(tmp_path, "eval", 6)
    config = make_config(tmp_path, [f"model.compile={setting}", "train.deterministic=false", "precision.opt_level=O0"])
    (tmp_path / "runs" / "checkpoints").mkdir(parents=True)
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(options) or function)
    build.build(config, Runtime(), RunFolder(tmp_path / "runs"), Stop(Runtime())).close()
    assert given == [{"mode": mode}]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_compiled_pass_is_one_graph(level):
    """With the casts of amp, which are hooks of the model and rules for operations, and without a graph break."""
    from torch._dynamo.utils import counters

    graphs, results = [], []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    for compiled in (False, True):
        torch.manual_seed(0)
        model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        if compiled:
            torch._dynamo.reset()
            counters.clear()
            strategy.compile_whole(model, backend=backend)
        for _ in range(3):
            outputs = model(torch.linspace(-1, 1, 64).view(4, 1, 4, 4))
            with amp.scale_loss(outputs.square().mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([outputs, *model.state_dict().values()])
        amp.reset()
    assert counters["graph_break"] == {}
    assert (len(graphs), counters["frames"]["total"]) == (1, 1)
    assert [value.dtype for value in results[0]] == [value.dtype for value in results[1]]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
