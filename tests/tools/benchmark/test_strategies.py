"""``harness bench strategies``: the plan of cases, their measurement, and the tables."""

from __future__ import annotations

import json
import re

import pytest
import torch

from harness.cli import main
from harness.config import loader
from harness.errors import ConfigError, HarnessError
from harness.tools.benchmark import strategies
from harness.tools.benchmark.strategies import PARTS, Bench, Case, parts
from tests.fixtures import settings, write_rows, write_yaml


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    write_rows(folder, "train", 20)
    write_rows(folder, "eval", 6)
    model = {"name": "mlp", "args": {"hidden": 1100}}
    tree = settings(
        folder, model=model, batch={"global": 8}, optimizer={"momentum": 0.9}, precision={"opt_level": "O0"}
    )
    return str(write_yaml(folder / "bench.yaml", tree))


def plan(config, *overrides, worlds=(1, 2)):
    return strategies.plan(config, overrides, loader.load(config, overrides), worlds)


def summary(cases):
    return [(case.name, case.num_processes, case.rows, case.communication) for case in cases]


def test_every_strategy_is_measured_with_and_without_communication(config):
    cases, left_out = plan(config)
    assert summary(cases) == [
        ("none", 1, 8, "none"), ("dp", 1, 8, "none"), ("none", 1, 4, "none"), ("none", 2, 4, "none"),
        ("ddp delayed", 2, 4, "fake"), ("ddp delayed", 2, 4, "real"), ("ddp overlapped", 2, 4, "fake"),
        ("ddp overlapped", 2, 4, "real"), ("fsdp", 2, 4, "fake"), ("fsdp", 2, 4, "real"),
    ]  # fmt: skip
    assert left_out == {}


def test_batch_per_rank_is_the_same_for_any_number_of_processes(config):
    cases, _ = plan(config, "batch.global=null", "batch.per_rank=8")
    assert {case.rows for case in cases} == {8}
    assert summary(cases)[2] == ("none", 2, 8, "none")  # one process with the rows of a rank is the first case already


def test_strategies_that_do_not_fit_are_left_out_with_a_reason(config):
    cases, left_out = plan(config, "precision.opt_level=O2", worlds=(1, 2, 3))
    assert "fsdp" not in {case.name for case in cases}
    assert "use precision.opt_level=O1" in left_out["fsdp"]
    assert left_out["3 processes"] == "batch.global=8 cannot be divided evenly among 3 ranks"


def test_processes_without_a_gpu_of_their_own_are_left_out(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    cases, left_out = plan(config, "runtime.device=auto")
    assert {case.num_processes for case in cases} == {1}
    assert left_out == {
        "2 processes": "this node has 1 visible CUDA device for 2 processes; each process needs its own"
    }
    with pytest.raises(ConfigError, match="unknown task"):
        strategies.strategies(config, ["task.name=nope"], [1], 1, 1, 1, None)


@pytest.mark.slow
@pytest.mark.parametrize("communication", ["real", "fake"])
def test_processes_measure_a_case(config, communication):
    figures = strategies.run(
        Case("fsdp", ("parallel.strategy=fsdp",), 2, 4, communication), config, [], steps=2, threads=1
    )
    assert figures["rows"] == 8
    assert figures["train_s"] > figures["forward_s"] > 0
    assert figures["parallel"] == "fsdp in 2 parts"
    assert figures["skipped"] == 0
    # weights, gradients and momentum of (64 x 1100 + 1100 + 1100 x 3 + 3) float32 numbers, over two ranks
    assert figures["held_bytes"] == 3 * 4 * (64 * 1100 + 1100 + 3300 + 3) / 2


def test_output_of_a_failed_process_is_in_the_error(config):
    case = Case("none", ("parallel.strategy=none",), 1, 4, "none")
    with pytest.raises(
        HarnessError, match="(?s)none on 1 process: process 0 failed .exit code 1.*folder /nowhere does not exist"
    ):
        strategies.run(case, config, ["task.root=/nowhere"], steps=2, threads=1)


# The tables, for synthetic figures


def synthetic(times: dict[tuple[str, int, int, str], list[float]]) -> Bench:
    def figures(name: str, processes: int, rows: int, train_ms: float) -> dict:
        held = 8e6 / processes if name == "fsdp" else 8e6
        on = "dp on one device (cpu)" if name == "dp" else name
        return {"train_s": train_ms / 1e3, "forward_s": train_ms / 4e3, "rows": rows * processes, "peak_bytes": 9e7,
                "held_bytes": held, "parallel": on}  # fmt: skip

    cases = [
        {"name": name, "processes": processes, "rows": rows, "communication": communication,
         "rounds": [figures(name, processes, rows, train_ms) for train_ms in rounds]}
        for (name, processes, rows, communication), rounds in times.items()
    ]  # fmt: skip
    return Bench("synthetic", "mlp", "O0", 10, 1, cases, {})


TIMES = {
    ("none", 1, 8, "none"): [100.0, 100.0, 100.5],
    ("dp", 1, 8, "none"): [100.0, 101.0, 101.0],
    ("none", 1, 4, "none"): [55.0, 55.0, 56.0],
    ("none", 2, 4, "none"): [58.0, 58.0, 59.0],
    ("ddp delayed", 2, 4, "fake"): [60.0, 60.0, 60.0],
    ("ddp delayed", 2, 4, "real"): [80.0, 80.5, 90.0],
    ("ddp overlapped", 2, 4, "fake"): [60.0, 60.0, 60.0],
    ("ddp overlapped", 2, 4, "real"): [64.0, 64.0, 64.0],
    ("fsdp", 2, 4, "fake"): [90.0, 90.0, 90.0],
    ("fsdp", 2, 4, "real"): [96.0, 97.0, 98.0],
}


def test_parts_add_up_to_the_step():
    found = synthetic(TIMES)
    delayed = found.distributed[0]
    where = parts(found, delayed)
    assert tuple(where) == PARTS
    assert {name: round(took * 1e3) for name, (took, _) in where.items()} == {
        "ideal": 50, "batch": 5, "contention": 3, "overhead": 2, "communication": 20,
    }  # fmt: skip
    assert where["communication"][1] == pytest.approx(0.5e-3)  # the noise between rounds
    assert sum(took for took, _ in where.values()) == pytest.approx(strategies.best(delayed, "train_s"))


def test_noise_is_shown():
    noisy = {key: [rounds[0], 2 * rounds[0], 3 * rounds[0]] for key, rounds in TIMES.items()}
    assert "The machine was busy" in strategies.text(synthetic(noisy))
    text = strategies.text(synthetic(TIMES))
    assert "The machine was busy" not in text
    assert re.search(r"ddp delayed +2 +8 +80.00 ± 0.50 +100 +1.25 ", text)
    assert re.search(r"ddp delayed +2 .* 20.00 ± 0.50 +80.00\n", text)
    assert "One round only" in strategies.text(synthetic({key: rounds[:1] for key, rounds in TIMES.items()}))


def test_command_prints_tables_and_writes_the_figures(config, tmp_path, monkeypatch, capsys):
    def figures(case, *_):
        return synthetic({(case.name, case.num_processes, case.rows, case.communication): [10.0]}).cases[0]["rounds"][0]

    monkeypatch.setattr(strategies, "run", figures)
    arguments = ["bench", "strategies", "-c", config, "batch.global=16", "--world", "2", "--rounds", "2"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"ddp overlapped +2 +16 ", text)
    assert re.search(r"dp on one device \(cpu\) +1 +16 ", text)
    content = json.loads((tmp_path / "out" / "strategies.json").read_text())
    assert [len(case["rounds"]) for case in content["cases"]] == [2] * 10
