"""The costs that a log line records beside the phases of a step."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from harness.distributed.launch_env import Launch
from harness.distributed.runtime import Runtime
from harness.training import costs
from harness.training.costs import Costs, summed
from tests.end_to_end.experiment import run as train
from tests.end_to_end.experiment import write_config, write_images

PHASES = {"data": 0.0, "forward": 1.0, "backward": 2.0, "reduce": 0.5, "optimizer": 0.1, "host": 0.4}


def taken(rank: int, **spent: float) -> list[float]:
    return Costs().take(Runtime(Launch(rank=rank, world_size=3)), PHASES | spent)


def test_the_slowest_rank_and_how_long_the_others_waited():
    """The exchange of gradients is no time of a rank's own: it is in there that the others wait."""
    of_ranks = [taken(0, reduce=4.0), taken(1, forward=3.0, data=1.5), taken(2, reduce=4.0, host=0.9)]
    cost = summed([sum(values) for values in zip(*of_ranks, strict=True)], 3)
    assert cost["slowest"] == 1
    assert cost["wait"] == pytest.approx(3.5 + 3.0)
    assert cost["slowest_data"] == pytest.approx(1.5)


def test_costs_start_anew_and_unknown_stages_are_left_out():
    mine, runtime = Costs(), Runtime()
    mine.add({"read": 2.0, "of a user's own": 1.0})
    mine.add({"read": 1.0})
    assert summed(mine.take(runtime, PHASES), 1) == {"read": 3.0}
    assert summed(mine.take(runtime, PHASES), 1) == {}


def test_the_machine_is_looked_at_rarely(monkeypatch):
    mine, runtime = Costs(), Runtime()
    for _ in range(20):
        assert "own" not in summed(mine.take(runtime, PHASES), 1)
    monkeypatch.setattr(costs, "SAMPLE_S", 0.05)
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        pass
    cost = summed(mine.take(runtime, PHASES), 1)
    assert 0 < cost["own"] <= cost["sampled"] == cost["sampled_ranks"]
    other = replace(runtime.launch, rank=1, local_rank=1, world_size=2)
    mine = Costs()
    time.sleep(0.06)
    cost = summed(mine.take(replace(runtime, launch=other), PHASES), 2)
    assert "sampled_ranks" in cost
    assert not {"sampled", "busy"} & cost.keys()  # the first rank of the machine reports for it


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_records_its_costs(tmp_path, world_size):
    data = write_images(tmp_path / "data")
    settings = {"train": {"epochs": 1, "log_every": 1}, "checkpoint": {"every_steps": 1}}
    config = write_config(tmp_path, data, batch={"global": 8}, **settings)
    assert train(config, world_size) == [0] * world_size
    folder = tmp_path / "runs" / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained, evaluated = ([line["cost"] for line in lines if line["split"] == split] for split in ("train", "eval"))
    assert len(trained) > 1
    for cost in trained:
        assert 0 < cost["read"] + cost["decode"] + cost["transform"] <= cost["load"]
        assert ("slowest" in cost) == (world_size > 1)
    assert all(cost["checkpoint"] > 0 and cost["log"] > 0 for cost in trained[1:])
    assert 0 < evaluated[0]["data"] < evaluated[0]["evaluation"]
    model = json.loads((folder / "provenance.json").read_text())[-1]["model"]
    assert model["gradient_bytes"] > 0
    assert model["operations"] > 0
