"""Times of the phases of a step: on the host by the clock, on CUDA by events that the host does not wait for."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from torch import nn

from harness.distributed.runtime import Runtime
from harness.trackers.metrics_log import TIMES
from harness.training.logical_ranks import LogicalRanks
from harness.training.progress import Meter
from harness.training.step_timer import PHASES, CudaTimer, HostTimer, StepTimer, end_backward_before_exchange
from tests.end_to_end.experiment import record, run, write_config, write_images
from tests.ranks import run_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_host_timer_adds_up_each_phase(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    timer = HostTimer()
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
    assert {f"time_{phase}" for phase in window.shares} < set(TIMES)
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
    timer = HostTimer()
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


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_metrics_have_the_shares(tmp_path, world_size):
    data = write_images(tmp_path / "data")
    config = write_config(tmp_path, data, train={"epochs": 1}, batch={"global": 8, "accumulate": 2})
    assert run(config, world_size) == [0] * world_size
    folder = tmp_path / "runs" / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["split"] == "train"]
    names = [name for name in TIMES if name.startswith("time_")]
    assert (len(train), len(names)) == (3, 6)
    for line in train:
        assert all(0 <= line[name] <= 1 for name in names)
        assert sum(line[name] for name in names) == pytest.approx(1, abs=1e-5)
        assert min(line[name] for name in ("time_forward", "time_backward", "time_optimizer", "time_host")) > 0
        assert line["time_data"] == pytest.approx(line["data_wait"], abs=1e-5)
        assert (line["time_reduce"] > 0) == (world_size > 1)
    assert all(name not in line for line in record(folder) for name in names)
