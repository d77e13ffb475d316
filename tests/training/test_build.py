"""Parts of the assembly of a run: the sizes of batches, and what is collective."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness.data.arrays import Arrays
from harness.distributed.launch_env import detect
from harness.distributed.runtime import open_runtime
from harness.errors import ConfigError
from harness.training import build
from tests.fixtures import make_config, write_rows
from tests.ranks import run_ranks


def _warned(without_labels: tuple[int, ...]) -> list[str]:
    """The warnings about shards with one label each, and none on the ranks ``without_labels``."""
    warnings: list[str] = []
    with open_runtime(detect(os.environ), "cpu", 10.0) as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setattr(build.log, "warning", lambda text, *args: warnings.append(text % args))
        counts = None if runtime.rank in without_labels else np.eye(2, dtype=int)[runtime.rank] * 4
        task: Any = SimpleNamespace(train=range(8), label_counts=lambda start, stop: counts)
        config: Any = SimpleNamespace(data=SimpleNamespace(shard="contiguous"))
        build.warn_of_skew(config, task, runtime)
        runtime.barrier()  # fails if the ranks are not at the same place
    return warnings


@pytest.mark.parametrize(("without_labels", "expected"), [((), 1), ((1,), 0), ((0, 1), 0)])
def test_skew_is_reported_if_every_rank_counts_labels(without_labels, expected):
    assert [len(found) for found in run_ranks(2, _warned, without_labels, group=False, timeout_s=40)] == [expected] * 2


def test_batch_is_stated_as_global_or_per_rank(tmp_path):
    """Both numbers are printed, and steps and learning rate follow from the global one."""
    write_rows(tmp_path, "train", 64)
    write_rows(tmp_path, "eval", 4)
    sizes = {
        key: [build.sizes(make_config(tmp_path, batch=batch), 64, world) for world in (1, 2, 4)]
        for key, batch in {"global": {"global": 16}, "per_rank": {"global": None, "per_rank": 16}}.items()
    }
    assert [(size.global_batch, size.per_rank) for size in sizes["global"]] == [(16, 16), (16, 8), (16, 4)]
    assert len({(size.steps_per_epoch, size.lr) for size in sizes["global"]}) == 1
    assert [size.global_batch for size in sizes["per_rank"]] == [16, 32, 64]
    with pytest.raises(ConfigError, match="exactly one of"):
        make_config(tmp_path, batch={"global": None})
    config = make_config(tmp_path, batch={"global": 16})
    facts = build.describe(
        config, build.open_task(config, build.Runtime()), sizes["global"][1], 2, torch.device("cpu"), "harness"
    )
    assert facts["batch"] == "8 per rank, 16 in total"


def _slow_data(folder: Path) -> tuple[str, bool]:
    """Rank 1, on a machine with a cold cache, converts the tables for longer than a rank may be silent."""
    with open_runtime(detect(os.environ), "cpu", 1.0, 60.0) as runtime, pytest.MonkeyPatch.context() as patch:
        config, converted = make_config(folder / str(runtime.rank)), build._opened
        late_s = 3.0 * runtime.rank
        patch.setattr(build, "_opened", lambda *given: time.sleep(late_s) or converted(*given))
        opened = build.open_task(config, runtime)
        return opened.fingerprint, runtime.gather(len(opened.train)) == [6, 6]


def test_rank_that_converts_its_tables_for_long_is_waited_for(tmp_path):
    for rank in range(2):
        write_rows(tmp_path / str(rank), "train", 6)
        write_rows(tmp_path / str(rank), "eval", 4)
    (first, both), (second, _) = run_ranks(2, _slow_data, tmp_path, group=False, timeout_s=60)
    assert both
    assert first == second


def rows_of(*shape: int) -> Any:
    """A task whose rows are of ``shape``."""
    rows = Arrays(np.zeros((4, *shape), np.float32), np.zeros(4, np.int64))
    return SimpleNamespace(train=rows, prepare=lambda inputs: inputs)


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
    assert build.num_operations(model, rows_of(4)) > 3
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), streams)
    assert random.getstate() == python
    assert model.layer.weight.device.type == "cpu"


def test_operations_of_a_forward_pass():
    convolution = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    before = {name: value.clone() for name, value in convolution.state_dict().items()}
    few, more = (build.num_operations(nn.Sequential(convolution, *[nn.ReLU()] * k), rows_of(3, 9, 9)) for k in (0, 5))
    assert more == few + 5
    assert all(torch.equal(value, before[name]) for name, value in convolution.state_dict().items())
    assert build.num_operations(ByValue(), rows_of(4)) is None
