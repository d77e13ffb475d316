"""The plan of a sweep: settings, machine and comparability are checked before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.config import loader
from harness.config.merge import typed
from harness.errors import ConfigError
from harness.tools.sweep.plan import PlannedTrial, confounders, make
from harness.tools.sweep.slots import Machine
from harness.tools.sweep.spec import SweepSpec, grid, load
from tests.fixtures import settings, write_yaml
from tests.tools.sweep.sweeping import write_base, write_sweep

GRID = {"launch.nproc": [1, 2], "data.shard": ["global"]}


def not_planned(tmp_path, *overrides: str, cores: int = 8, **content) -> str:
    """The error of a valid sweep file whose trials cannot run."""
    write_base(tmp_path)
    write_sweep(tmp_path, **content)
    with pytest.raises(ConfigError) as caught:
        make(load(str(tmp_path / "sweep.yaml"), overrides), Machine(cores))
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_settings_are_checked_before_anything_runs(tmp_path):
    message = not_planned(
        tmp_path, space={"optimizer.lr": [0.1, -1.0], "batch.global": [4, 6]}, set_={"train.epohcs": 3}, seeds=[0, 1]
    )
    assert "sweep.yaml" in message
    assert "train.epohcs: unknown key; did you mean train.epochs?" in message
    assert "optimizer.lr: it should be greater than 0 (found: -1.0)" in message
    assert "and 1 more trial\n" in message
    assert not (tmp_path / "tried").exists()


def test_a_problem_of_all_trials_names_none(tmp_path, caplog):
    caplog.set_level("INFO", "harness")
    message = not_planned(tmp_path, space={"optimizer.lr": [0.1, 0.2]}, set_={"train.epohcs": 3})
    assert "train.epohcs: unknown key" in message
    assert "in [optimizer.lr" not in message
    assert "checking 2 trials" in caplog.text


def test_the_configuration_of_a_run_is_not_a_sweep(tmp_path):
    (tmp_path / "run.yaml").write_text("name: a\ntask: {name: mnist}\n")
    with pytest.raises(ConfigError, match="this is the configuration of a run; a sweep file has base: and space:"):
        load(str(tmp_path / "run.yaml"))


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
    assert "with batch.per_rank the global batch depends on the world size" in message
    assert "set: {data.shard: global}" in message
    assert "comparable: false" in message
    write_sweep(tmp_path, **content, comparable=False)
    plan = make(load(str(tmp_path / "sweep.yaml")), Machine(2))
    assert len(plan.notes) == 2


def test_batch_norm_is_found_in_the_model(tmp_path):
    model = {"name": "small_cnn", "args": {"width": 2, "batch_norm": True}}
    content = {"space": {"launch.nproc": [1, 2]}, "set_": {"data.shard": "global", "model": model}}
    assert "batch norm uses the rows of one rank" in not_planned(tmp_path, **content)
    content["set_"]["parallel.sync_batchnorm"] = True
    write_sweep(tmp_path, **content)
    assert make(load(str(tmp_path / "sweep.yaml")), Machine(2)).notes == []


@pytest.mark.parametrize(("place", "resume"), [("base", "auto"), ("base", "never"), ("command line", "never")])
def test_interrupted_trials_resume_whatever_the_base_says(tmp_path, place, resume):
    in_base = place == "base"
    write_base(tmp_path, checkpoint={"resume": resume if in_base else "auto"})
    write_sweep(tmp_path, space={"optimizer.lr": [0.1, 0.2]})
    file = load(str(tmp_path / "sweep.yaml"), [] if in_base else [f"checkpoint.resume={resume}"])
    plan = make(file, Machine(1))
    config = loader.load(file.base, plan.words(plan.trials[1].settings))
    assert (config.checkpoint.resume, config.optimizer.lr) == ("auto", 0.2)


def test_unknown_metric_is_refused(tmp_path):
    assert "has no metric 'f1'" in not_planned(tmp_path, space={"optimizer.lr": [0.1]}, metric="f1")


def test_a_name_that_only_building_finds_has_its_line_in_the_sweep_file(tmp_path):
    message = not_planned(tmp_path, space={"model.name": ["linear", "linaer"]})
    assert "  sweep.yaml:5: model.name: unknown model 'linaer'\n  -> did you mean linear?" in message


def test_missing_data_are_refused_once(tmp_path):
    message = not_planned(tmp_path, space={"optimizer.lr": [0.1, 0.2]}, set_={"task.train_csv": "none.csv"})
    assert message.count("none.csv") >= 1
    assert "1 problem in the sweep" in message


def judged(
    tmp_path: Path, space: Any, batch_norm: bool = False, seeds: tuple[int, ...] = (), **fixed: Any
) -> list[str]:
    """The confounders; ``fixed``: settings, with __ for a dot."""
    base = write_yaml(tmp_path / "base.yaml", settings(tmp_path, batch={"global": 8}))
    common = {key.replace("__", "."): value for key, value in fixed.items()}
    sweep = SweepSpec.model_validate({"name": "x", "base": "b", "space": space, "seeds": list(seeds)})
    trials = [PlannedTrial(trial, loader.load(base, typed({**common, **trial}))) for trial in grid(sweep)]
    return list(confounders(trials, lambda config: batch_norm))


PER_RANK = {"batch__global": None, "batch__per_rank": 4}


@pytest.mark.parametrize(
    ("space", "fixed", "message"),
    [
        (GRID, PER_RANK, "with batch.per_rank the global batch"),
        ({"launch.nproc": [1, 2]}, {}, "data.shard=contiguous"),
        (GRID, {"batch_norm": True}, "batch norm uses the rows of one rank"),
        ({"batch.global": [4, 8]}, {"train__max_steps": 5}, "different numbers of samples (20, 40)"),
    ],
)
def test_confounded_trials_are_found(tmp_path, space, fixed, message):
    (found,) = judged(tmp_path, space, **fixed)
    assert message in found


@pytest.mark.parametrize(
    ("space", "fixed"),
    [
        ({"optimizer.lr": [0.1, 0.2], "batch.global": [4, 8]}, {}),
        ({**GRID, "batch.global": [4, 8]}, {}),
        (GRID, {"batch_norm": True, "parallel__sync_batchnorm": True}),
        ({"optimizer.lr": [0.1, 0.2]}, {"batch_norm": True, "data__shard": "contiguous"}),
        (GRID, {"seeds": (0, 1, 2)}),
        ({"seed": [0, 1], "optimizer.lr": [0.1, 0.2]}, {}),
        ({"train.max_steps": [5, 6], "batch.global": [4, 8]}, {}),
    ],
)
def test_comparable_trials_have_no_confounder(tmp_path, space, fixed):
    assert judged(tmp_path, space, **fixed) == []
