"""Sweep files: valid ones, errors with their lines, plans, dry runs, and the files of the repository."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

from harness import cli
from harness.config import loader
from harness.errors import EXIT_USAGE, ConfigError
from harness.tools.sweep import spec
from harness.tools.sweep.plan import make
from harness.tools.sweep.slots import Machine
from harness.tools.sweep.spec import corners, grid, typed
from harness.tools.sweep.sweep_file import load
from tests.conftest import ROOT
from tests.tools.sweep.sweeping import write_base, write_sweep

SHIPPED = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
GOOD = "name: x\nbase: base.yaml\nspace:\n  optimizer.lr: [0.1, 0.2]\n"


def refused(tmp_path, text: str, *overrides: str) -> str:
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(str(tmp_path / "sweep.yaml"), overrides)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value).replace(f"{tmp_path}/", "")


def not_planned(tmp_path, *overrides: str, cores: int = 8, **content) -> str:
    """The error of a valid sweep file whose trials cannot run."""
    write_base(tmp_path)
    write_sweep(tmp_path, **content)
    with pytest.raises(ConfigError) as caught:
        make(load(str(tmp_path / "sweep.yaml"), overrides), None, None, Machine(cores))
    return str(caught.value).replace(f"{tmp_path}/", "")


# The file alone


def test_all_problems_at_once_with_lines(tmp_path):
    message = refused(
        tmp_path,
        "name: a b\nbaze: base.yaml\nspace:\n  optimizer.lr: 0.1\n  seed: {low: 1, hihg: 3}\n"
        "parallel: 0\nsampler: tpee\n",
    )
    expected = {
        1: "name: ",
        2: "baze: unknown key; did you mean base?",
        4: "space.optimizer.lr: it should be a list (found: 0.1)",
        5: "space.seed.hihg: unknown key",
        6: "parallel: it should be greater than or equal to 1 (found: 0)",
        7: "sampler: 'tpee' is not allowed; use 'grid'",
    }
    for line, problem in expected.items():
        assert f"sweep.yaml:{line}: {problem}" in message, message
    assert "base: required, but not set" in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("space: {}\n", "space: nothing varies"),
        ("output: s3://bucket/runs\n", "output: a sweep needs a local folder to follow its trials"),
        ("set: {optimizer.lr: 1}\n", "space.optimizer.lr: varied by space and fixed by set"),
        ("set: {optimizer: {lr: 1}}\n", "space.optimizer.lr: varied by space and fixed by set"),
        ("set: {output: here}\n", "set.output: the sweep sets it for each trial"),
        ("space: {name: [a, b]}\n", "space.name: the sweep sets it for each trial"),
        ("space: {seed: [1, 2]}\nseeds: [3]\n", "seeds: the seed is varied twice"),
        ("trials: 3\n", "trials: trials is only for a search, but this is a grid"),
        ("sampler: tpe\n", "sampler: a search needs a number of trials"),
        ("sampler: tpe\ntrials: 3\nspace: [{optimizer.lr: 1}]\n", "space: a search draws from ranges and choices"),
        ("sampler: tpe\ntrials: 3\nseeds: [1]\n", "seeds: a search trains each draw once"),
        ("sampler: tpe\ntrials: 3\nspace: {a: [[1], 2]}\n", "space.a: a search chooses only among numbers, words"),
        ("space: {a: {low: 1, high: 2}}\n", "space.a: a grid needs single values"),
        ("space: {a: [1, 2, 1]}\n", "space.a: a value is listed twice"),
        ("space: [{a: 1}, {a: 1}]\n", "space: a trial is listed twice"),
        ("sampler: tpe\ntrials: 3\nspace: {a: {low: 2, high: 2}}\n", "space.a: low 2 is not below high 2"),
        ("sampler: tpe\ntrials: 3\nspace: {a: {low: 0, high: 2, log: true}}\n", "space.a: log: true needs low > 0"),
        ("sampler: tpe\ntrials: 3\nspace: {a: {low: 1, high: 2, log: true, step: 1}}\n", "space.a: log and step"),
        ("sampler: tpe\ntrials: 3\nspace: {a: {low: 1, high: .inf}}\n", "space.a.high: it should be a finite number"),
        ("pruner_args: {n_warmup_steps: 1}\n", "pruner_args: there is no pruner to use them"),
    ],
)
def test_contradicting_settings_are_refused(tmp_path, text, problem):
    tree = {**yaml.safe_load(GOOD), **yaml.safe_load(text)}
    assert problem in refused(tmp_path, yaml.safe_dump(tree, sort_keys=False))


def test_overrides_change_the_file_or_every_trial(tmp_path):
    (tmp_path / "sweep.yaml").write_text(GOOD + "set: {train.epochs: 3, seed: 1}\n")
    found = load(str(tmp_path / "sweep.yaml"), ["name=y", "parallel=2", "train.epochs=5", "optimizer.args={a: 1}"])
    assert (found.spec.name, found.spec.parallel) == ("y", 2)
    assert found.fixed == {"train.epochs": 5, "seed": 1, "optimizer.args.a": 1}
    assert found.base == str(tmp_path / "base.yaml")
    assert "optimizer.lr is varied by the space" in refused(tmp_path, GOOD, "optimizer.lr=1")
    assert "'nonsense' is not an override" in refused(tmp_path, GOOD, "nonsense")
    assert "command line: 'train.epochs={': " in refused(tmp_path, GOOD, "train.epochs={")


# The file with its base experiment


def test_settings_are_checked_before_anything_runs(tmp_path):
    message = not_planned(
        tmp_path, space={"optimizer.lr": [0.1, -1.0], "batch.global": [4, 6]}, set_={"train.epohcs": 3}, seeds=[0, 1]
    )
    assert "sweep.yaml" in message
    assert "train.epohcs: unknown key; did you mean train.epochs?" in message
    assert "optimizer.lr: it should be greater than 0 (found: -1.0)" in message
    assert "and 1 more trial\n" in message
    assert not (tmp_path / "tried").exists()


def test_batch_that_ranks_cannot_share_and_machine_that_is_too_small(tmp_path):
    message = not_planned(
        tmp_path, space={"launch.nproc": [1, 4], "batch.global": [6]}, set_={"data.shard": "global"}, cores=2
    )
    assert "2 problems in the sweep; nothing was started" in message
    assert "this machine cannot run [launch.nproc=4 batch.global=6]: 4 cores needed" in message
    assert "6 rows cannot be divided evenly among 4 ranks" in message


def test_incomparable_trials_are_refused_with_a_remedy(tmp_path):
    content = {"space": {"launch.nproc": [1, 2]}, "set_": {"batch.global": None, "batch.per_rank": 2}}
    message = not_planned(tmp_path, **content)
    assert "world sizes have different global batches (1 rank: 2; 2 ranks: 4)" in message
    assert "set: {data.shard: global}" in message
    assert "comparable: false" in message
    write_sweep(tmp_path, **content, comparable=False)
    plan = make(load(str(tmp_path / "sweep.yaml")), None, None, Machine(2))
    assert len(plan.notes) == 2


def test_batch_norm_is_found_in_the_model(tmp_path):
    model = {"name": "small_cnn", "args": {"width": 2, "batch_norm": True}}
    content = {"space": {"launch.nproc": [1, 2]}, "set_": {"data.shard": "global", "model": model}}
    assert "batch norm uses the rows of one rank" in not_planned(tmp_path, **content)
    content["set_"]["parallel.sync_batchnorm"] = True
    write_sweep(tmp_path, **content)
    assert make(load(str(tmp_path / "sweep.yaml")), None, None, Machine(2)).notes == []


def test_unknown_metric_is_refused(tmp_path):
    assert "has no metric 'f1'" in not_planned(tmp_path, space={"optimizer.lr": [0.1]}, metric="f1")


def test_missing_data_are_refused_once(tmp_path):
    message = not_planned(tmp_path, space={"optimizer.lr": [0.1, 0.2]}, set_={"task.train_csv": "none.csv"})
    assert message.count("none.csv") >= 1
    assert "1 problem in the sweep" in message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"sampler_args": {"n_startup": 3}}, "sampler_args: Optuna's TPESampler rejects its arguments"),
        (
            {"pruner": "median", "pruner_args": {"warmup": 3}},
            "pruner_args: Optuna's MedianPruner rejects its arguments",
        ),
    ],
)
def test_errors_of_optuna_are_reported(tmp_path, content, problem, capsys):
    write_base(tmp_path)
    space = {"optimizer.lr": {"low": 0.1, "high": 0.2}}
    write_sweep(tmp_path, space=space, sampler="tpe", trials=2, **content)
    assert cli.main(["sweep", "-c", str(tmp_path / "sweep.yaml")]) == 2
    assert problem in capsys.readouterr().err


def test_damaged_study_is_reported_with_its_place(tmp_path, capsys):
    write_base(tmp_path)
    write_sweep(tmp_path, space={"optimizer.lr": [0.1, 0.2]})
    (tmp_path / "tried").mkdir()
    (tmp_path / "tried" / "study.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 84)
    assert cli.main(["sweep", "-c", str(tmp_path / "sweep.yaml")]) == 2
    message = capsys.readouterr().err
    assert "study.db: cannot open Optuna's storage" in message
    assert "if the file is damaged, move it elsewhere" in message


def test_missing_optuna_is_reported_with_a_hint(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    write_base(tmp_path)
    write_sweep(tmp_path, space={"optimizer.lr": [0.1, 0.2]})
    assert cli.main(["sweep", "-c", str(tmp_path / "sweep.yaml")]) == 2
    assert "pip install 'apex-harness[sweep]'" in capsys.readouterr().err


def test_dry_run_prints_commands_and_starts_nothing(tmp_path, capsys):
    write_base(tmp_path)
    write_sweep(tmp_path, space={"optimizer.lr": [0.1, 0.2]})
    assert cli.main(["sweep", "-c", str(tmp_path / "sweep.yaml"), "train.epochs=2", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"harness launch -c {tmp_path}/base.yaml train.epochs=2 optimizer.lr=0.1 output=")
    assert len(lines) == 3
    assert not (tmp_path / "tried").exists()


# Files of the repository


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_sweeps_are_valid(path):
    assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    found = load(str(path))
    for settings in corners(found.spec) if found.spec.is_search else grid(found.spec):
        loader.load(found.base, typed({**found.fixed, **settings}))


def test_schema_is_current():
    committed = (ROOT / "configs" / "sweeps" / "schema.json").read_text()
    assert committed == spec.json_schema(), "run: harness schema --of sweep --out configs/sweeps/schema.json"
    schema = json.loads(committed)
    assert schema["additionalProperties"] is False
    assert all("description" in field for name, field in schema["properties"].items() if name != "name")
