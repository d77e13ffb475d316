"""The meter measures the loss, the time of each phase (with events on CUDA) and other costs between two log lines."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from harness.distributed.launch_env import Launch, detect
from harness.distributed.process_group import open_runtime
from harness.distributed.runtime import Runtime
from harness.runs.metrics_table import FIELDS, SHARES
from harness.training.measuring.costs import Costs, CostsOfRanks, summed
from harness.training.measuring.meter import Meter, StepRows
from harness.training.measuring.step_timer import PHASES, CudaTimer, StepTimer, end_backward_before_exchange
from harness.training.reproducibility.logical_ranks import LogicalRanks
from tests.end_to_end.experiment import record, run, write_config, write_images
from tests.fixtures import make_config, write_rows
from tests.ranks import run_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_host_timer_adds_up_each_phase(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    timer = StepTimer()
    for _ in range(2):
        now_s += 8.0  # between steps
        timer.start()
        for phase, seconds in (("forward", 1.0), ("backward", 2.0), ("forward", 4.0), ("optimizer", 0.5)):
            now_s += seconds
            timer.end(phase)
    timer.settle()
    assert timer.spent_s == {"forward": 10.0, "backward": 4.0, "reduce": 0.0, "optimizer": 1.0}


class Device:
    """Simulates torch.cuda: queued work, and events that are passed when the device reaches them."""

    def __init__(self) -> None:
        self.queued_s, self.done_s, self.events = 0.0, 0.0, 0

    def Event(self, enable_timing: bool) -> Event:  # noqa: N802 - torch.cuda's name
        assert enable_timing
        self.events += 1
        return Event(self)

    def current_stream(self, device: torch.device) -> Device:
        return self


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, -1.0

    def record(self, stream: Device) -> None:
        self.at_s = stream.queued_s

    def query(self) -> bool:
        return self.at_s <= self.device.done_s

    def synchronize(self) -> None:
        self.device.done_s = max(self.device.done_s, self.at_s)

    def elapsed_time(self, end: Event) -> float:
        assert self.query(), "CUDA rejects events that are not passed"
        assert end.query(), "CUDA rejects events that are not passed"
        return (end.at_s - self.at_s) * 1000


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch, "cuda", device)
    return device


def steps(timer: StepTimer, device: Device, count: int) -> None:
    for _ in range(count):
        device.queued_s += 1.0  # idle between steps
        timer.start()
        for number, phase in enumerate(PHASES):
            device.queued_s += number + 1
            timer.end(phase)


def test_cuda_timer_waits_only_in_settle_and_reuses_events(device):
    timer = CudaTimer(CUDA)
    for round_ in (1, 2):
        steps(timer, device, 10)
        assert device.done_s < device.queued_s
        timer.settle()
        assert device.done_s == device.queued_s
        expected = {"forward": 10, "backward": 20, "reduce": 30, "optimizer": 40}
        assert timer.spent_s == pytest.approx({phase: seconds * round_ for phase, seconds in expected.items()})
    assert device.events == 10 * 5 + 1


@pytest.mark.parametrize(("lag_steps", "events"), [(10, 400), (1000, 5001)])
def test_cuda_timer_needs_as_many_events_as_the_device_lags_behind(device, lag_steps, events):
    timer = CudaTimer(CUDA)
    for _ in range(100):
        steps(timer, device, 10)
        device.done_s = max(0.0, device.queued_s - lag_steps * 11)
    assert device.events <= events
    timer.settle()
    assert timer.spent_s == pytest.approx({"forward": 1000, "backward": 2000, "reduce": 3000, "optimizer": 4000})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_timer_on_a_real_device():
    timer, matrix = CudaTimer(CUDA), torch.randn(2048, 2048, device=CUDA)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(300):
        timer.start()
        matrix = (matrix @ matrix).clamp(-1, 1)
        timer.end("forward")
    timer.settle()
    assert 0 < timer.spent_s["forward"] <= time.perf_counter() - start


# Shares of the time between two log lines


def filled(time_s: float, wait_s: float, **spent: float) -> Meter:
    meter = Meter(CPU)
    meter.time_s, meter.wait_s = time_s, wait_s
    meter.timer.spent_s |= spent
    return meter


def test_shares_add_up_and_the_rest_is_the_host():
    window = filled(10.0, 1.0, forward=2.0, backward=4.0, optimizer=0.5).reduce(LogicalRanks(Runtime()))
    assert window.shares == pytest.approx(
        {"data": 0.1, "forward": 0.2, "backward": 0.4, "reduce": 0.0, "optimizer": 0.05, "host": 0.25}
    )
    assert tuple(f"time_{phase}" for phase in window.shares) == SHARES
    assert window.waited == pytest.approx(0.1)
    assert set(filled(0.0, 0.0).reduce(LogicalRanks(Runtime())).shares.values()) == {0.0}


def test_waiting_for_data_while_the_device_works_is_not_a_share():
    window = filled(10.0, 6.0, forward=9.0).reduce(LogicalRanks(Runtime()))
    assert window.shares["data"] == pytest.approx(0.1)
    assert sum(window.shares.values()) == pytest.approx(1)
    assert window.waited == pytest.approx(0.6)


def test_times_survive_a_checkpoint():
    saved = {**filled(10.0, 1.0, forward=2.0).state()[0], "time_s": 10.0}  # without the duration of this test
    resumed = Meter(CPU)
    resumed.load_state([saved])
    resumed.timer.spent_s["forward"] += 1.0
    expected = {"data": 1, "forward": 3, "backward": 0, "reduce": 0, "optimizer": 0, "host": 6}
    assert resumed.spent_s() == pytest.approx(expected)
    resumed.reduce(LogicalRanks(Runtime()))
    assert set(resumed.spent_s().values()) == {0.0}


# Backward and the exchange of gradients


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return gradient


def _one_slow_rank(overlap: bool) -> dict[str, float]:
    """Rank 1 takes 0.5 s longer to compute its gradients, which rank 0 waits for."""
    import torch.distributed as dist

    from harness.apex.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Linear(4, 1), delay_allreduce=not overlap)
    timer = StepTimer()
    hidden = model(torch.randn(3, 4))
    for _ in range(1 + 5 * dist.get_rank()):
        hidden = Slow.apply(hidden)
    loss = hidden.sum()
    dist.barrier()
    timer.start()
    end_backward_before_exchange(timer, loss)
    loss.backward()
    timer.end("reduce")
    return timer.spent_s


@pytest.mark.parametrize("overlap", [False, True])
def test_waiting_for_a_slow_rank_is_communication(overlap):
    fast, slow = run_ranks(2, _one_slow_rank, overlap)
    # Lower bounds only: a busy machine makes all of it longer.
    assert 0.1 <= fast["backward"] < slow["backward"]
    assert slow["backward"] >= 0.6
    assert fast["reduce"] > slow["reduce"]
    assert fast["backward"] + fast["reduce"] >= 0.5


# The loss


def of_losses(losses: list[tuple[float, int]]) -> Meter:
    meter = Meter(CPU)
    for mean, rows in losses:
        add(meter, mean, rows)
    return meter


def add(
    meter: Meter, mean: float, rows: int, skip: bool = False, tolerated: bool = False, bad: Sequence[int] = ()
) -> None:
    if not tolerated:
        meter.add_loss(torch.tensor(mean, requires_grad=True), rows, skip)
    meter.count(StepRows([], [rows], [[*bad]]), skip)


def test_loss_is_the_mean_over_rows():
    meter = of_losses([(1.0, 4), (3.0, 1)])
    meter.wait_s, meter.time_s = 0.25, 1.0
    add(meter, 9.0, 3, skip=True, bad=[8, 5])
    seen = meter.reduce(LogicalRanks(Runtime()))
    assert (seen.loss, seen.rows, seen.rows_skipped) == (pytest.approx(7 / 5), 8, 3)
    assert (seen.bad, seen.bad_rows, seen.waited) == (2, [5, 8], 0.25)
    assert (meter.rows, meter.bad, meter.steps, meter.wait_s, meter.time_s) == ([0], [[]], 0, 0, 0)
    assert meter.losses[0].item() == 0
    seen = meter.reduce(LogicalRanks(Runtime()))
    assert math.isnan(seen.loss)
    assert seen.rows == 0
    for tolerated, total in ((True, 0.0), (False, math.nan)):
        add(meter, math.inf, 3, skip=True, tolerated=tolerated)
        assert meter.reduce(LogicalRanks(Runtime())).total == pytest.approx(total, nan_ok=True)


def test_loss_resumes_exactly():
    whole, first = of_losses([(0.1, 3), (0.2, 3), (0.3, 2)]), of_losses([(0.1, 3)])
    add(first, 1.0, 5, skip=True, tolerated=True, bad=[7])
    second = Meter(CPU)
    second.load_state(first.state())
    for mean, rows in [(0.2, 3), (0.3, 2)]:
        add(second, mean, rows)
    assert torch.equal(second.losses[0], whole.losses[0])
    assert (second.rows, second.rows_skipped, second.steps, second.bad) == (whole.rows, [5], 4, [[7]])


def test_time_outside_training_is_excluded(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    meter = Meter(CPU)
    now_s = 100.0
    meter.restart_clock()
    now_s = 107.0
    meter.tick()
    assert meter.time_s == 7.0
    now_s = 108.0
    meter.stop_clock()
    now_s = 200.0
    assert not meter.is_running
    meter.tick()
    meter.stop_clock()
    assert meter.time_s == 8.0
    meter.restart_clock()
    now_s = 201.0
    assert meter.is_running
    meter.tick()
    assert meter.time_s == 9.0


def _reduce():
    with open_runtime(detect(os.environ), "cpu", 20.0) as runtime:
        meter = of_losses([(1.0, 4)] if runtime.rank == 0 else [])
        add(meter, 1.0, 2, skip=True, tolerated=True, bad=[6] * runtime.rank)
        return meter.reduce(LogicalRanks(runtime))[1:6]


def test_loss_over_ranks():
    assert run_ranks(2, _reduce, group=False, timeout_s=30) == [(1.0, 8, 4, 1, [6])] * 2


# Costs


PHASES_S = {"data": 0.0, "forward": 1.0, "backward": 2.0, "reduce": 0.5, "optimizer": 0.1, "host": 0.4}


def taken(rank: int, **spent: float) -> CostsOfRanks:
    return Costs().take(Runtime(Launch(rank=rank, world_size=3)), PHASES_S | spent)


def test_the_slowest_rank_and_how_long_the_others_waited():
    """The exchange of gradients is no time of a rank's own: it is in there that the others wait."""
    of_ranks = [taken(0, reduce=4.0), taken(1, forward=3.0, data=1.5), taken(2, reduce=4.0, host=0.9)]
    cost = summed(
        CostsOfRanks.of([sum(values) for values in zip(*(costs.vector() for costs in of_ranks), strict=True)])
    )
    assert cost["slowest"] == 1
    assert cost["wait"] == pytest.approx(3.5 + 3.0)
    assert cost["slowest_data"] == pytest.approx(1.5)


def test_costs_start_anew_and_unknown_ones_are_refused():
    mine, runtime = Costs(), Runtime()
    mine.add({"read": 2.0})
    with pytest.raises(KeyError, match="another"):
        mine.add({"another": 1.0})
    mine.add({"read": 1.0})
    assert summed(mine.take(runtime, PHASES_S)) == {"read": 3.0}
    assert summed(mine.take(runtime, PHASES_S)) == {}


def test_the_machine_is_looked_at_rarely(monkeypatch):
    mine, runtime = Costs(), Runtime()
    for _ in range(20):
        assert "own" not in summed(mine.take(runtime, PHASES_S))
    monkeypatch.setattr("harness.training.measuring.costs.SAMPLE_S", 0.05)
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        pass
    cost = summed(mine.take(runtime, PHASES_S))
    assert 0 < cost["own"] <= cost["sampled"] == cost["sampled_ranks"]
    other = replace(runtime.launch, rank=1, local_rank=1, world_size=2)
    mine = Costs()
    time.sleep(0.06)
    cost = summed(mine.take(replace(runtime, launch=other), PHASES_S))
    assert "sampled_ranks" in cost
    assert not {"sampled", "busy"} & cost.keys()  # the first rank of the machine reports for it


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_records_shares_and_costs(tmp_path, world_size):
    data = write_images(tmp_path / "data")
    settings = {"train": {"epochs": 1, "log_every": 1}, "checkpoint": {"every": 1}}
    config = write_config(tmp_path, data, batch={"global": 8, "accumulate": 2}, **settings)
    assert run(config, world_size) == [0] * world_size
    folder = tmp_path / "runs" / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained, epochs, evaluated = ([line for line in lines if line["split"] == split] for split in FIELDS)
    assert len(trained) > 1
    assert {"split", *FIELDS["train"]} == trained[0].keys()
    assert {"split", *FIELDS["epoch"]} == epochs[0].keys()
    assert {"split", *FIELDS["eval"]} < evaluated[0].keys()
    for line in trained:
        assert all(0 <= line[name] <= 1 for name in SHARES)
        assert sum(line[name] for name in SHARES) == pytest.approx(1, abs=1e-5)
        assert min(line[name] for name in ("time_forward", "time_backward", "time_optimizer", "time_host")) > 0
        assert line["time_data"] == pytest.approx(line["data_wait"], abs=1e-5)
        assert (line["time_reduce"] > 0) == (world_size > 1)
        cost = line["cost"]
        assert 0 < cost["read"] + cost["decode"] + cost["transform"] <= cost["load"]
        assert ("slowest" in cost) == (world_size > 1)
    assert all(line["cost"]["checkpoint"] > 0 and line["cost"]["log"] > 0 for line in trained[1:])
    assert 0 < evaluated[0]["cost"]["data"] < evaluated[0]["cost"]["evaluation"]
    assert all(name not in line for line in record(folder) for name in SHARES)
    model = json.loads((folder / "provenance.json").read_text())[-1]["model"]
    assert model["gradient_bytes"] > 0
    assert model["layers"] > 0


def test_records_of_a_run(tmp_path):
    """The gradient norm is that of the unscaled gradients of the line's last step, before clipping."""
    from harness import open_run, train
    from harness.runs import metrics_table
    from harness.training.task import prepare

    write_rows(tmp_path, "train", 20)
    write_rows(tmp_path, "eval", 4)
    groups = [{"match": "*bias", "lr_scale": 0.5}]
    sections = {
        "batch": {"global": 8},
        "optimizer": {"lr": 0.2, "groups": groups},
        "train": {"epochs": 1, "log_every": 2},
    }
    norms: list[float] = []
    with open_run(make_config(tmp_path, ["name=byhand"], **sections)) as run:
        for (micro,) in run.train_data.groups(0, []):
            loss = run.task.loss(run.module(prepare(run, micro.batch.inputs)), micro.batch.targets)
            loss.backward()
            norms.append(torch.stack([parameter.grad.norm() for parameter in run.module.parameters()]).norm().item())
            run.optimizer.step()
            run.optimizer.zero_grad()
    for clip in (None, 0.1):
        extra = {**sections, "train": {**sections["train"], "clip_norm": clip, "max_steps": 3}}
        config = make_config(tmp_path, [f"name=clip{clip}", "precision.loss_scale=128"], **extra)
        table, _ = metrics_table.read(tmp_path / "runs" / train(config).folder.split("/")[-1] / "metrics.jsonl")
        lines = [line for line in table.to_pylist() if line["split"] == "train"]
        assert [line["step"] for line in lines] == [2, 3]
        if clip is None:
            assert [line["grad_norm"] for line in lines] == [pytest.approx(norm, rel=1e-2) for norm in norms[1:]]
        assert all(line["grad_norm"] > 0.1 for line in lines)
        assert all((line["lr"], line["lr_group_1"]) == (0.2, 0.1) for line in lines)
        assert all(line["memory_mib"] > 50 for line in lines)
