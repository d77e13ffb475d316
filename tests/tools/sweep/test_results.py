"""The final table, sweep.json and rankings."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("optuna", reason="optuna is not installed: pip install 'apex-harness[sweep]'")

from harness.runs.files import write_sealed
from harness.tools.sweep import main, results
from harness.tools.sweep.plan import Plan, make
from harness.tools.sweep.slots import Machine
from harness.tools.sweep.spec import load
from harness.tools.sweep.study import SweepTrial
from tests.tools.sweep.sweeping import write_base, write_sweep

TRIALS = [
    SweepTrial(0, {"optimizer.lr": 0.1, "optimizer.name": "sgd"}, "finished", 0.5),
    SweepTrial(1, {"optimizer.lr": 0.2, "optimizer.name": "sgd"}, "finished", 0.75),
    SweepTrial(2, {"optimizer.lr": 0.1, "optimizer.name": "adam"}, "failed", None, "the loss\nbecame nan " + 80 * "x"),
    SweepTrial(3, {"optimizer.lr": 0.2, "optimizer.name": "adam"}, "running"),
    SweepTrial(4, {"optimizer.lr": 0.3, "optimizer.name": "adam"}, "pruned", 0.25),
]


@pytest.fixture
def plan(tmp_path) -> Plan:
    write_base(tmp_path)
    write_sweep(tmp_path, space={"optimizer.lr": [0.1, 0.2], "optimizer.name": ["sgd", "adam"]})
    return make(load(str(tmp_path / "sweep.yaml")), Machine(2))


def test_table(plan):
    lines = results.table(results.ranked(TRIALS, "maximize"), plan, 120)
    assert [line.split() for line in lines[:3]] == [
        ["trial", "lr", "optimizer", "state", "top1"],
        ["0001", "0.2", "sgd", "finished", "0.75"],
        ["0000", "0.1", "sgd", "finished", "0.5"],
    ]
    assert [line.split()[0] for line in lines[1:-1]] == ["0001", "0000", "0004", "0003", "0002"]
    assert lines[-1] == f"0002: the loss became nan {80 * 'x'}"
    assert max(map(len, results.table(TRIALS, plan, 40)[:-1])) <= 40
    twins = [replace(TRIALS[2], number=number) for number in (2, 5)]
    assert results.table([*twins, TRIALS[0]], plan, 40)[-1].startswith("0002, 0005: the loss became nan xxx")


def test_lowest_value_ranks_first_when_minimizing():
    assert [trial.number for trial in results.ranked(TRIALS, "minimize")][:2] == [0, 1]


def test_sweep_json(plan, tmp_path):
    results.write(tmp_path / "sweep.json", plan, TRIALS)
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert {key: content[key] for key in ("name", "direction", "metric", "space")} == {
        "name": "tried",
        "direction": "maximize",
        "metric": "top1",
        "space": {"optimizer.lr": [0.1, 0.2], "optimizer.name": ["sgd", "adam"]},
    }
    assert content["trials"][2] == {
        "number": 2, "run": "trials/0002", "params": {"optimizer.lr": 0.1, "optimizer.name": "adam"}, "world": 1,
        "state": "failed", "value": None, "error": "the loss\nbecame nan " + 80 * "x",
    }  # fmt: skip


def test_over_seeds():
    trials = [
        SweepTrial(number, {"optimizer.lr": lr, "seed": seed}, "finished", value)
        for number, (lr, seed, value) in enumerate([(0.1, 0, 0.5), (0.1, 1, 0.7), (0.2, 0, 0.9), (0.2, 1, 0.1)])
    ]
    failed = SweepTrial(4, {"optimizer.lr": 0.3, "seed": 0}, "failed")
    lucky = SweepTrial(5, {"optimizer.lr": 0.3, "seed": 1}, "finished", 0.95)
    found = results.over_seeds([*trials, failed, lucky], "maximize")
    assert [(entry.settings, len(entry.trials)) for entry in found] == [
        ({"optimizer.lr": 0.1}, 2),
        ({"optimizer.lr": 0.2}, 2),
        ({"optimizer.lr": 0.3}, 1),
    ]
    assert found[0].mean == pytest.approx(0.6)
    assert found[0].deviation == pytest.approx(0.1414, abs=1e-4)


@pytest.mark.parametrize(
    ("values", "equal"), [((0.5, 0.9, 0.9, 0.9), "  as good: 0002, 0003"), ((0.5, 0.9, 0.8), None)]
)
def test_trials_as_good_as_the_best_are_named(tmp_path, values, equal):
    spec = SimpleNamespace(folder=tmp_path, name="s", seeds=[0])
    plan = SimpleNamespace(direction="maximize", metric="top1", file=SimpleNamespace(spec=spec))
    trials = [SweepTrial(number, {"lr": number}, "finished", value) for number, value in enumerate(values)]
    lines = [line for line in main._best(plan, trials) if not line.startswith("  harness")]
    assert lines == ["best: trial 0001, top1 0.9", *([equal] if equal else [])]


@pytest.mark.parametrize(
    ("values", "earlier", "accuracies", "why"),
    [((0.5, 0.5), 0.5, (0.5, 0.5), "all of them have the same top1"), ((0.5, 0.6), 0.4, (1.0, 0.0), "each gives all"),
     ((0.5, 0.6), 0.4, (0.4, 0.6), None), ((0.5,), 0.5, (1.0, 0.0), None), ((0.5, 0.5), 0.4, (0.5, 0.5), None),
     ((1.0, 1.0), 1.0, (1.0, 1.0), None), ((0.5, 0.6), 0.4, (0.9, 0.0), None), ((0.5, 0.6), 0.4, (1.0, None), None),
     ((0.5, 0.6), 0.4, "a text", None)],
)  # fmt: skip
def test_a_sweep_that_taught_nothing_is_told(tmp_path, values, earlier, accuracies, why):
    spec = SimpleNamespace(folder=tmp_path, name="s", seeds=[0])
    plan = SimpleNamespace(direction="maximize", metric="top1", file=SimpleNamespace(spec=spec))
    trials = [SweepTrial(number, {"lr": number}, "finished", value) for number, value in enumerate(values)]
    for trial in trials:
        folder = results.run_folder(tmp_path, trial.number)
        (folder / "checkpoints").mkdir(parents=True)
        write_sealed(folder / "config.yaml", {"name": "a"})
        rows = [{"split": "eval", "step": step, "top1": value} for step, value in enumerate((earlier, trial.value))]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        shares = accuracies if isinstance(accuracies, str) else dict(zip("ab", accuracies, strict=True))
        write_sealed(folder / "summary.json", {"evaluation": {"class_accuracy": shares}})
    warnings = [line for line in main._best(plan, trials) if line.startswith("warning: ")]
    assert len(warnings) == (why is not None)
    assert why is None or f"learned anything: {why}" in warnings[0]
