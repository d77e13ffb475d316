"""``make gpu-check``: a rehearsal on the CPU, so that it works when a GPU is at hand; and a machine without one."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_check, machine, made_up_data
from benchmarks.gpu_check import Check, Plan, perform
from tests.conftest import ROOT
from tests.end_to_end.processes import python


def call(folder: Path, *words: str) -> tuple[int, str]:
    """(exit code, output of all calls with this folder)"""
    terminal = folder / "terminal.txt"
    return python(["-m", "benchmarks.gpu_check", *words], terminal, PYTHONPATH=str(ROOT)), terminal.read_text()


def test_without_a_gpu_nothing_is_written(tmp_path):
    before = {path: path.read_bytes() for path in machine.RESULTS.iterdir()}
    code, text = call(tmp_path)
    assert code == 2
    assert "torch sees no CUDA device, so nothing was checked or written" in text
    assert "harness doctor" in text
    assert {path: path.read_bytes() for path in machine.RESULTS.iterdir()} == before
    assert "--device cpu needs --out FILE" in call(tmp_path, "--device", "cpu")[1]


@pytest.mark.slow
def test_rehearsal_on_a_cpu(tmp_path):
    """A training on two ranks, an engine and a use of its run; the page, and continuing."""
    out = tmp_path / "gpu.md"
    words = ["--device", "cpu", "--steps", "2", "--out", str(out)]
    code, text = call(tmp_path, *words, "--only", "all-reduce", "config mnist, 2", "predict")
    assert code == 0, text
    page = out.read_text()
    assert "no GPU: a rehearsal on the CPU" in page
    assert "4 passed, 0 failed, 0 skipped" in page
    for row in ("config mnist, 2 ranks | passed", "engine local | passed", "predict | passed"):
        assert f"| {row}" in page
    seconds = {row["name"]: row["seconds"] for row in json.loads(out.with_suffix(".json").read_text())["rows"]}
    assert call(tmp_path, *words, "--only", "all-reduce", "level O0")[0] == 0
    rows = {row["name"]: row for row in json.loads(out.with_suffix(".json").read_text())["rows"]}
    assert rows["all-reduce"]["seconds"] == seconds["all-reduce"]  # not repeated
    assert rows["level O0"]["outcome"] == "passed"


@pytest.fixture
def plan(tmp_path):
    return Plan("cuda", 2, 4, tmp_path)


def test_plan_covers_what_is_shipped(plan):
    checks = {check.name: check for check in plan.checks()}
    for path in (ROOT / "configs").glob("*.yaml"):
        assert plan.words(path, 1), f"add data for the task {gpu_check._task(path)} to benchmarks/made_up_data.py"
        assert {f"config {path.stem}, 1 rank", f"config {path.stem}, 2 ranks"} <= checks.keys()
    for name in ("all-reduce", "level O1", "compile", "channels-last", "modern preset", "fsdp, 2 ranks", "dp",
                 "engine local", "engine torchrun", "resume after kills, 2 ranks", "export torch_export",
                 "speed of resnet50, 224 x 224, modern preset, compiled", "tests of harness.apex: o1",
                 "compile, reduce-overhead"):  # fmt: skip
        assert name in checks
        assert not checks[name].skipped
    assert all("runtime.device=cuda" in command for check in checks.values() for command in check.commands
               if "launch" in command)  # fmt: skip
    assert "nccl" in checks["all-reduce"].commands[0][-1]
    alone = {check.name: check for check in Plan("cuda", 1, 4, plan.folder).checks()}
    assert alone["fsdp, 2 ranks"].skipped == "needs two GPUs"
    assert "config digits, 1 rank" in alone


def test_most_telling_checks_come_first_and_fit_into_the_time(plan):
    """On a card that is lent for 40 minutes, the first third must be enough."""
    alone = [check for check in Plan("cuda", 1, 4, plan.folder).checks() if not check.skipped]
    names = [check.name for check in alone]
    first = names[: len(names) // 3]
    for name in ("all-reduce", "level O1", "level O2", "level O4", "resume after kills, 1 rank", "tests marked gpu",
                 "modern preset", "compile", "speed of resnet50, 224 x 224, modern preset", "predict"):  # fmt: skip
        assert name in first
    assert all(check.limit_s * len(check.commands) <= gpu_check.LIMIT_S / 3 for check in alone)
    assert gpu_check.LIMIT_S <= 25 * 60


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_each_rank_measures_a_whole_batch(tmp_path, world):
    """``benchmarks.steps`` takes its batch from the data, which must have enough rows for every number of ranks."""
    plan = Plan("cuda", world, 4, tmp_path)
    speeds = [check for check in plan.checks() if check.name.startswith("speed of resnet50")]
    for check in speeds:
        words = dict(word.split("=", 1) for word in check.commands[0] if "=" in word)
        assert words["batch.per_rank"] == str(gpu_check.BENCH_ROWS)
        assert words["batch.global"] == "null"
        rows = len(Path(words["task.train_csv"]).read_text().splitlines()) - 1
        assert rows >= gpu_check.BENCH_ROWS * world
        assert len(check.commands) == (2 if world > 1 else 1)


def test_missing_packages_are_named_and_leave_the_apex_tests(tmp_path):
    checks = {check.name: check for check in Plan("cuda", 1, 4, tmp_path, ["pydantic"]).checks()}
    assert checks["level O1"].skipped == "pydantic not installed"
    assert checks["tests marked gpu"].commands[0][-1] == "tests/apex"
    assert not checks["tests of harness.apex: o1"].skipped
    plan = Plan("cuda", 1, 4, tmp_path, ["pydantic"])
    text = gpu_check.announced(plan, list(checks.values()), 1500, tmp_path / "gpu.md")
    assert "at most 25 minutes" in text
    assert "not installed: pydantic" in text
    assert "left out: level O1 (pydantic not installed)" in text


def test_packages_are_those_of_setup_cfg(monkeypatch):
    assert gpu_check.missing_packages() == []
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    assert {"torch", "pydantic", "omegaconf", "filelock", "safetensors"} <= set(gpu_check.missing_packages())


def test_dry_run_lists_the_checks_and_writes_nothing(tmp_path):
    out = tmp_path / "gpu.md"
    code, text = call(tmp_path, "--dry-run", "--out", str(out), "--only", "level O0", "level O1")
    assert code == 0
    assert text.startswith("2 checks on ")
    assert "  level O0 (at most " in text
    assert not out.exists()


def test_check_ends_with_the_time_of_the_call(tmp_path):
    sleeps = Check("x", [[sys.executable, "-c", "import time; time.sleep(60)"]])
    began = time.monotonic()
    assert perform(sleeps, tmp_path, left_s=0.2).outcome == "late"
    assert time.monotonic() - began < 30
    row = perform(replace(sleeps, limit_s=0.2), tmp_path, left_s=60)
    assert (row.outcome, row.result.partition(":")[0]) == ("failed", "no end after 0.2 s")


def test_modern_preset_of_the_plan_is_the_preset():
    import yaml

    from harness.config import presets
    from harness.config.trees import flatten

    settings = flatten(yaml.safe_load(presets.path("modern").read_text()))
    given = dict(word.split("=") for word in gpu_check.VARIANTS["modern preset"])
    assert {key: yaml.safe_load(value) for key, value in given.items()} | {"model.compile": False} == settings


def test_failed_command_is_a_failed_row(tmp_path, capfd):
    python = [sys.executable, "-c"]
    row = perform(Check("x", [[*python, "raise ValueError('planned')"]]), tmp_path)
    assert (row.outcome, row.result) == ("failed", "1: ValueError: planned")
    row = perform(Check("x", [[*python, "pass"]], lambda: json.loads("{")), tmp_path)
    assert row.outcome == "failed"
    assert "JSONDecodeError" in row.result
    assert perform(Check("x", [[*python, "raise SystemExit(1)"]], skipped="no dask"), tmp_path).outcome == "skipped"
    assert "1 failed" in gpu_check.page([row], "cpu", "abc")


def test_run_on_another_device_or_with_fewer_steps_is_not_accepted(plan):
    run = plan.folder / "run"
    run.mkdir()
    (run / "provenance.json").write_text(
        json.dumps([{"ranks": [{"host": "h", "device": "cpu", "name": "a: cuda (b)"}] * 2}])
    )
    (run / "metrics.jsonl").write_text('{"split": "train", "step": 4, "loss": 1.0}\n')
    with pytest.raises(AssertionError, match="'device': 'cpu'"):
        plan.trained(run, 2)
    (run / "provenance.json").write_text(json.dumps([{"ranks": [{"host": "h", "device": "cuda:0", "name": "H200"}]}]))
    assert plan.trained(run, 1) == "loss 1.000"
    (run / "metrics.jsonl").write_text('{"split": "train", "step": 3, "loss": 1.0}\n')
    with pytest.raises(AssertionError, match="'step': 3"):
        plan.trained(run, 1)


def test_made_up_data_for_an_unknown_task(tmp_path):
    assert made_up_data.write(tmp_path, "no_such_task") is None
