"""Where the time of a step goes: shares that add up, on a CPU by the clock, on CUDA by events that nobody waits for."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from torch import nn

from harness.distributed.runtime import Runtime
from harness.trackers.metrics_log import TIMES
from harness.training import step_timer
from harness.training.progress import Meter
from harness.training.step_timer import PHASES, DeviceClock, HostClock, end_with_local_work
from tests.end_to_end.experiment import record, run, write_config, write_images
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_each_phase_gets_its_own_time(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: now_s)
    clock = HostClock()
    for _ in range(2):
        now_s += 8.0  # between steps: nobody's
        clock.start()
        for phase, seconds in (("forward", 1.0), ("backward", 2.0), ("forward", 4.0), ("optimizer", 0.5)):
            now_s += seconds
            clock.end(phase)
    clock.settle()
    assert clock.spent_s == {"forward": 10.0, "backward": 4.0, "reduce": 0.0, "optimizer": 1.0}


class Device:
    """A stream: work that takes its time, and events that are passed when the device gets there."""

    def __init__(self) -> None:
        self.told_s, self.done_s, self.made = 0.0, 0.0, 0

    def Event(self, enable_timing: bool) -> Event:  # noqa: N802 - torch.cuda's name
        assert enable_timing
        self.made += 1
        return Event(self)

    def current_stream(self, device: torch.device) -> Device:
        return self


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, -1.0

    def record(self, stream: Device) -> None:
        self.at_s = stream.told_s

    def query(self) -> bool:
        return self.at_s <= self.device.done_s

    def synchronize(self) -> None:
        self.device.done_s = max(self.device.done_s, self.at_s)

    def elapsed_time(self, end: Event) -> float:
        assert self.query(), "CUDA refuses events that are not passed"
        assert end.query(), "CUDA refuses events that are not passed"
        return (end.at_s - self.at_s) * 1000


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(step_timer.torch, "cuda", device)
    return device


def steps(clock: step_timer.Clock, device: Device, count: int) -> None:
    for _ in range(count):
        device.told_s += 1.0  # the device stands idle between steps
        clock.start()
        for number, phase in enumerate(PHASES):
            device.told_s += number + 1
            clock.end(phase)


def test_events_are_read_where_the_host_waits_anyway(device):
    clock = DeviceClock(torch.device("cuda"))
    steps(clock, device, 10)
    assert set(clock.spent_s.values()) == {0.0}  # nothing was read, so nothing waited
    clock.settle()
    assert device.done_s == device.told_s
    assert clock.spent_s == pytest.approx({"forward": 10, "backward": 20, "reduce": 30, "optimizer": 40})
    made = device.made
    steps(clock, device, 10)
    clock.settle()
    clock.settle()
    assert clock.spent_s == pytest.approx({"forward": 20, "backward": 40, "reduce": 60, "optimizer": 80})
    assert device.made <= made + 1  # the same events again


def test_a_long_window_needs_few_events(device):
    """Between two log lines that lie 10,000 steps apart, with a device ten steps behind the host."""
    clock = DeviceClock(torch.device("cuda"))
    for _ in range(1000):
        steps(clock, device, 10)
        device.done_s = device.told_s - 10 * 11
    assert device.made < 400
    clock.settle()
    assert clock.spent_s["forward"] == pytest.approx(10_000)


def test_a_device_far_behind_loses_nothing(device):
    clock = DeviceClock(torch.device("cuda"))
    steps(clock, device, 1000)
    clock.settle()
    assert clock.spent_s == pytest.approx({"forward": 1000, "backward": 2000, "reduce": 3000, "optimizer": 4000})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_events_of_a_real_device():
    device = torch.device("cuda")
    clock, matrix = DeviceClock(device), torch.randn(2048, 2048, device=device)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(300):
        clock.start()
        matrix = (matrix @ matrix).clamp(-1, 1)
        clock.end("forward")
    clock.settle()
    assert 0 < clock.spent_s["forward"] <= time.perf_counter() - began


# What the meter makes of it


def filled(time_s: float, wait_s: float, **spent: float) -> Meter:
    meter = Meter(CPU)
    meter.time_s, meter.wait_s = time_s, wait_s
    meter.clock.spent_s |= spent
    return meter


def test_the_rest_is_the_hosts():
    window = filled(10.0, 1.0, forward=2.0, backward=4.0, optimizer=0.5).reduce(Runtime())
    assert window.shares == pytest.approx(
        {"data": 0.1, "forward": 0.2, "backward": 0.4, "reduce": 0.0, "optimizer": 0.05, "host": 0.25}
    )
    assert f"time_{next(iter(window.shares))}" in TIMES
    assert window.waited == pytest.approx(0.1)


def test_waiting_that_the_device_did_not_notice_is_no_share():
    """The host waited for data while the device had steps to do."""
    window = filled(10.0, 6.0, forward=9.0).reduce(Runtime())
    assert window.shares["data"] == pytest.approx(0.1)
    assert sum(window.shares.values()) == pytest.approx(1)
    assert window.waited == pytest.approx(0.6)


def test_a_window_without_time_has_no_shares():
    assert set(filled(0.0, 0.0).reduce(Runtime()).shares.values()) == {0.0}


def test_a_window_starts_at_zero_and_goes_on_from_a_checkpoint():
    whole = filled(10.0, 1.0, forward=2.0)
    saved = whole.state_dict()
    saved["time_s"] = 10.0  # without what this test takes
    resumed = Meter(CPU)
    resumed.load_state_dict(saved)
    resumed.clock.spent_s["forward"] += 1.0
    assert resumed.spent_s() == pytest.approx(
        {"data": 1, "forward": 3, "backward": 0, "reduce": 0, "optimizer": 0, "host": 6}
    )
    resumed.reduce(Runtime())
    assert set(resumed.spent_s().values()) == {0.0}
    old = Meter(CPU)
    old.load_state_dict({key: saved[key] for key in ("loss", "rows", "bad", "steps", "wait_s", "time_s")})
    assert old.clock.spent_s == dict.fromkeys(PHASES, 0.0)


# Where messages begin


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return gradient


def _one_slow_rank(overlap: bool) -> dict[str, float]:
    """Rank 1 computes its gradients 0.5 s longer, which rank 0 waits for."""
    import torch.distributed as dist

    from harness.apex.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Linear(4, 1), delay_allreduce=not overlap)
    clock = HostClock()
    hidden = model(torch.randn(3, 4))
    for _ in range(1 + 5 * dist.get_rank()):
        hidden = Slow.apply(hidden)
    loss = hidden.sum()
    dist.barrier()
    clock.start()
    end_with_local_work(clock, loss)
    loss.backward()
    clock.end("reduce")
    return clock.spent_s


@pytest.mark.parametrize("overlap", [False, True])
def test_waiting_for_a_slow_rank_is_communication(overlap):
    quick, slow = run_ranks(2, _one_slow_rank, overlap)
    # A busy machine makes all of it longer: only what must be so is asked.
    assert 0.1 <= quick["backward"] < slow["backward"]
    assert slow["backward"] >= 0.6
    assert quick["reduce"] > slow["reduce"]
    assert quick["backward"] + quick["reduce"] >= 0.5


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_record_says_where_the_time_went(tmp_path, world_size):
    data = write_images(tmp_path / "data")
    config = write_config(tmp_path, data, train={"epochs": 1}, batch={"global": 8, "accumulate": 2})
    assert run(config, world_size) == [0] * world_size
    folder = tmp_path / "runs" / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["split"] == "train"]
    names = [name for name in TIMES if name.startswith("time_")]
    assert len(train) == 3
    assert len(names) == 6
    for line in train:
        assert all(0 <= line[name] <= 1 for name in names)
        assert sum(line[name] for name in names) == pytest.approx(1, abs=1e-5)
        assert min(line[name] for name in ("time_forward", "time_backward", "time_optimizer", "time_host")) > 0
        assert line["time_data"] == pytest.approx(line["data_wait"], abs=1e-5)
        assert (line["time_reduce"] > 0) == (world_size > 1)
    assert all(name not in line for line in record(folder) for name in names)
