"""Sweep files: what they may say, what is refused, and those of the repository."""

from __future__ import annotations

import json

import pytest
import yaml

from harness import cli
from harness.config import loader
from harness.errors import EXIT_USAGE, ConfigError
from harness.sweep import file, spec
from harness.sweep.plan import make
from harness.sweep.slots import Machine
from harness.sweep.space import corners, grid, typed
from tests.conftest import ROOT
from tests.sweep.sweeping import write_base, write_sweep

SHIPPED = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
GOOD = "name: x\nbase: base.yaml\nspace:\n  optimizer.lr: [0.1, 0.2]\n"


def refused(tmp_path, text: str, *overrides: str) -> str:
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        file.load(str(tmp_path / "sweep.yaml"), overrides)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value).replace(f"{tmp_path}/", "")


def not_planned(tmp_path, *overrides: str, cores: int = 8, **content) -> str:
    """Why a file that can be read is not run."""
    write_base(tmp_path)
    write_sweep(tmp_path, **content)
    with pytest.raises(ConfigError) as caught:
        make(file.load(str(tmp_path / "sweep.yaml"), overrides), None, None, Machine(cores))
    return str(caught.value).replace(f"{tmp_path}/", "")


# The file by itself


def test_all_problems_at_once_with_lines(tmp_path):
    message = refused(
        tmp_path,
        "name: a b\nbaze: base.yaml\nspace:\n  optimizer.lr: 0.1\n  seed: {low: 1, hihg: 3}\n"
        "parallel: 0\nsampler: tpee\n",
    )
    expected = {
        1: "name: ",
        2: "baze: unknown key; did you mean base?",
        4: "space.optimizer.lr: it should be a valid list (found: 0.1)",
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
        ("space: {}\n", "space: nothing is varied"),
        ("output: s3://bucket/runs\n", "output: a sweep reads its trials' records as they are written"),
        ("set: {optimizer.lr: 1}\n", "space.optimizer.lr: varied by space, and one value in set"),
        ("set: {optimizer: {lr: 1}}\n", "space.optimizer.lr: varied by space, and one value in set"),
        ("set: {output: here}\n", "set.output: the sweep gives each trial its own"),
        ("space: {name: [a, b]}\n", "space.name: the sweep gives each trial its own"),
        ("space: {seed: [1, 2]}\nseeds: [3]\n", "seeds: the seed is varied twice"),
        ("trials: 3\n", "trials: trials is for a search, and this is a grid"),
        ("sampler: tpe\n", "sampler: a search ends after a number of trials, and none is set"),
        ("sampler: tpe\ntrials: 3\nspace: [{optimizer.lr: 1}]\n", "space: a search draws from ranges and choices"),
        ("sampler: tpe\ntrials: 3\nseeds: [1]\n", "seeds: a search trains each draw once"),
        ("sampler: tpe\ntrials: 3\nspace: {a: [[1], 2]}\n", "space.a: a search chooses among numbers and words only"),
        ("space: {a: {low: 1, high: 2}}\n", "space.a: a grid needs each value"),
        ("space: {a: [1, 2, 1]}\n", "space.a: a value stands here twice"),
        ("space: [{a: 1}, {a: 1}]\n", "space: a trial stands here twice"),
        ("sampler: tpe\ntrials: 3\nspace: {a: {low: 2, high: 2}}\n", "space.a: low 2 is not below high 2"),
        ("sampler: tpe\ntrials: 3\nspace: {a: {low: 0, high: 2, log: true}}\n", "space.a: log of 0"),
        ("sampler: tpe\ntrials: 3\nspace: {a: {low: 1, high: 2, log: true, step: 1}}\n", "space.a: log and step"),
        ("sampler: tpe\ntrials: 3\nspace: {a: {low: 1, high: .inf}}\n", "space.a.high: it should be a finite number"),
        ("pruner_args: {n_warmup_steps: 1}\n", "pruner_args: there is no pruner to take them"),
    ],
)
def test_what_cannot_stand_together(tmp_path, text, problem):
    tree = {**yaml.safe_load(GOOD), **yaml.safe_load(text)}
    assert problem in refused(tmp_path, yaml.safe_dump(tree, sort_keys=False))


def test_overrides_are_the_files_or_the_trials(tmp_path):
    (tmp_path / "sweep.yaml").write_text(GOOD + "set: {train.epochs: 3, seed: 1}\n")
    found = file.load(str(tmp_path / "sweep.yaml"), ["name=y", "parallel=2", "train.epochs=5", "optimizer.args={a: 1}"])
    assert (found.sweep.name, found.sweep.parallel) == ("y", 2)
    assert found.fixed == {"train.epochs": 5, "seed": 1, "optimizer.args.a": 1}
    assert found.base == str(tmp_path / "base.yaml")
    assert "optimizer.lr is varied by the space" in refused(tmp_path, GOOD, "optimizer.lr=1")
    assert "'nonsense' is not an override" in refused(tmp_path, GOOD, "nonsense")


# The file with its base


def test_settings_are_checked_before_anything_runs(tmp_path):
    message = not_planned(
        tmp_path, space={"optimizer.lr": [0.1, -1.0], "batch.global": [4, 6]}, set_={"train.epohcs": 3}, seeds=[0, 1]
    )
    assert "sweep.yaml" in message
    assert "train.epohcs: unknown key; did you mean train.epochs?" in message
    assert "optimizer.lr: it should be greater than 0 (found: -1.0)" in message
    assert "and 1 more trials" in message
    assert not (tmp_path / "tried").exists()


def test_a_batch_that_cannot_be_dealt_and_a_machine_that_is_too_small(tmp_path):
    message = not_planned(
        tmp_path, space={"launch.nproc": [1, 4], "batch.global": [6]}, set_={"data.shard": "global"}, cores=2
    )
    assert "2 problems in the sweep; nothing was started" in message
    assert "this machine cannot run [launch.nproc=4 batch.global=6]: it needs 4 cores" in message
    assert "6 examples cannot be divided among 4 ranks" in message


def test_what_cannot_be_compared_is_refused_with_the_remedy(tmp_path):
    content = {"space": {"launch.nproc": [1, 2]}, "set_": {"batch.global": None, "batch.per_rank": 2}}
    message = not_planned(tmp_path, **content)
    assert "world sizes have different global batches (1 ranks: 2; 2 ranks: 4)" in message
    assert "set: {data.shard: global}" in message
    assert "comparable: false" in message
    write_sweep(tmp_path, **content, comparable=False)
    plan = make(file.load(str(tmp_path / "sweep.yaml")), None, None, Machine(2))
    assert len(plan.notes) == 2


def test_batch_norm_is_found_in_the_model(tmp_path):
    model = {"name": "small_cnn", "args": {"width": 2, "batch_norm": True}}
    content = {"space": {"launch.nproc": [1, 2]}, "set_": {"data.shard": "global", "model": model}}
    assert "batch norm sees the rows of its rank alone" in not_planned(tmp_path, **content)
    content["set_"]["parallel.sync_batchnorm"] = True
    write_sweep(tmp_path, **content)
    assert make(file.load(str(tmp_path / "sweep.yaml")), None, None, Machine(2)).notes == []


def test_a_metric_that_the_task_has_not(tmp_path):
    assert "has no metric 'f1'" in not_planned(tmp_path, space={"optimizer.lr": [0.1]}, metric="f1")


def test_data_that_are_not_there(tmp_path):
    message = not_planned(tmp_path, space={"optimizer.lr": [0.1, 0.2]}, set_={"task.train_csv": "none.csv"})
    assert message.count("none.csv") >= 1
    assert "1 problem in the sweep" in message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"sampler_args": {"n_startup": 3}}, "sampler_args: Optuna's TPESampler cannot be made"),
        ({"pruner": "median", "pruner_args": {"warmup": 3}}, "pruner_args: Optuna's MedianPruner cannot be made"),
        ({"storage": "nosuch://x:secret@y/z"}, "Optuna's storage cannot be opened"),
    ],
)
def test_what_only_optuna_knows(tmp_path, content, problem, capsys):
    write_base(tmp_path)
    space = {"optimizer.lr": {"low": 0.1, "high": 0.2}}
    write_sweep(tmp_path, space=space, sampler="tpe", trials=2, **content)
    assert cli.main(["sweep", "-c", str(tmp_path / "sweep.yaml")]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert "secret" not in said


def test_a_dry_run_prints_commands_and_does_nothing(tmp_path, capsys):
    write_base(tmp_path)
    write_sweep(tmp_path, space={"optimizer.lr": [0.1, 0.2]})
    assert cli.main(["sweep", "-c", str(tmp_path / "sweep.yaml"), "train.epochs=2", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"harness launch -c {tmp_path}/base.yaml train.epochs=2 optimizer.lr=0.1 output=")
    assert len(lines) == 3
    assert not (tmp_path / "tried").exists()


# Those of the repository


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_sweeps_load_and_their_grids_are_valid(path):
    assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    found = file.load(str(path))
    for settings in corners(found.sweep) if found.sweep.is_search else grid(found.sweep):
        loader.load(found.base, typed({**found.fixed, **settings}))


def test_shipped_sweeps_are_these():
    assert [path.stem for path in SHIPPED] == ["digits_search", "pet_names"]


def test_schema_in_the_repository_is_current():
    committed = (ROOT / "configs" / "sweeps" / "schema.json").read_text()
    assert committed == spec.json_schema(), "run: harness schema --of sweep --out configs/sweeps/schema.json"
    schema = json.loads(committed)
    assert schema["additionalProperties"] is False
    assert all("description" in field for name, field in schema["properties"].items() if name != "name")
