"""Model FLOPs, and their share of a device's peak."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from harness.config.schema import PrecisionSection
from harness.data.arrays import Arrays
from harness.training.models import flops
from harness.training.models.flops import Arithmetic
from tests.fixtures import make_config, write_rows


def count(model: nn.Module, task: Task) -> Arithmetic:
    return flops.of_run(model, task, PrecisionSection(), torch.device("cpu"))()


class Task:
    """Rows of ``shape``."""

    def __init__(self, *shape: int) -> None:
        self.train = Arrays(torch.zeros(4, *shape), torch.zeros(4, dtype=torch.int64))

    def prepare(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


class ByValue(nn.Module):
    """Cannot be traced without values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) if inputs.sum().item() > 0 else self.layer(-inputs)


class Remembers(nn.Module):
    """Counts its calls, and draws from two streams on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 2), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(inputs) * (torch.rand(1).item() + random.random())


def test_a_model_does_not_notice_that_it_was_counted():
    model, streams, python = Remembers(), torch.get_rng_state(), random.getstate()
    assert count(model, Task(4)).per_row == 3 * 2 * 4 * 2
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), streams)
    assert random.getstate() == python
    assert model.layer.weight.device.type == "cpu"


def test_flops_of_a_row():
    """Two for each multiplication and addition, three times: forward, and backward for inputs and for weights."""
    convolution = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten())
    before = {name: value.clone() for name, value in convolution.state_dict().items()}
    streams = torch.get_rng_state()
    assert count(convolution, Task(3, 10, 10)).per_row == 3 * 2 * 3 * 3 * 3 * 8 * 100
    assert torch.equal(torch.get_rng_state(), streams)
    assert all(torch.equal(value, before[name]) for name, value in convolution.state_dict().items())
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    assert count(tied, Task(6)).per_row == 3 * 2 * 6 * 6 * 2
    assert count(ByValue(), Task(4)) == Arithmetic()


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", {"opt_level": "O1"}, 312e12),
        ("NVIDIA A100-SXM4-80GB", {"opt_level": "O0", "tf32": True}, 156e12),
        ("NVIDIA A100-SXM4-80GB", {"opt_level": "O0"}, None),
        ("NVIDIA A10", {"opt_level": "O4"}, 125e12),
        ("NVIDIA H100 PCIe", {"opt_level": "O5"}, 756e12),
        ("NVIDIA H100 80GB HBM3", {"opt_level": "O2"}, 989e12),
        ("Tesla V100-SXM2-16GB", {"opt_level": "O0", "tf32": True}, None),
        ("NVIDIA L4", {"opt_level": "O1"}, 121e12),
        ("NVIDIA GeForce GTX 1080", {"opt_level": "O1"}, None),
    ],
)
def test_peak_and_utilisation(monkeypatch, name, settings, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = flops.peak(torch.device("cuda", 0), PrecisionSection(**settings))
    assert found == expected
    rates = flops.Arithmetic(per_row=10**9, peak=found).rates(rows_per_s=5000.0, world_size=2)
    assert rates["tflops"] == 5.0
    assert rates.get("mfu") == (None if expected is None else pytest.approx(5e12 / expected / 2))
    assert flops.peak(torch.device("cpu"), PrecisionSection(**settings)) is None


def test_records_of_a_run(tmp_path):
    """The gradient norm is that of the unscaled gradients of the line's last step, before clipping."""
    from harness import open_run, train
    from harness.runs.reader import read_metrics
    from harness.training.evaluation.evaluate import prepare

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
        lines = read_metrics(tmp_path / "runs" / train(config).folder.split("/")[-1] / "metrics.jsonl")[0].to_pylist()
        lines = [line for line in lines if line["split"] == "train"]
        assert [line["step"] for line in lines] == [2, 3]
        if clip is None:
            assert [line["grad_norm"] for line in lines] == [pytest.approx(norm, rel=1e-2) for norm in norms[1:]]
        assert all(line["grad_norm"] > 0.1 for line in lines)
        assert all((line["lr"], line["lr_group_1"]) == (0.2, 0.1) for line in lines)
        assert all(line["memory_mib"] > 50 and line["tflops"] > 0 and "mfu" not in line for line in lines)
