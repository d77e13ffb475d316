"""The state of a sweep: the next trial after any kill, and the effect of a changed sweep file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="optuna is not installed: pip install 'apex-harness[sweep]'")

from harness.errors import ConfigError
from harness.tools.sweep.plan import make
from harness.tools.sweep.slots import Machine
from harness.tools.sweep.spec import load
from harness.tools.sweep.study import Study, SweepTrial
from tests.tools.sweep.sweeping import write_base, write_sweep

GRID = {"space": {"optimizer.lr": [0.1, 0.2]}}
SEARCH: dict[str, Any] = {
    "space": {
        "optimizer.lr": {"low": 0.01, "high": 1.0, "log": True},
        "batch.global": {"low": 2, "high": 12, "step": 2},
        "optimizer.name": ["sgd", "adam"],
    },
    "sampler": "tpe",
    "sampler_args": {"n_startup_trials": 3},
    "trials": 6,
}


@pytest.fixture
def opened(tmp_path) -> Callable[..., Study]:
    """Opens the study of a sweep file, as each start of the sweep does."""
    write_base(tmp_path)

    def study(folder: Path | None = None, overrides: tuple[str, ...] = (), **content: Any) -> Study:
        write_sweep(tmp_path, **content)
        plan = make(load(str(tmp_path / "sweep.yaml"), overrides), Machine(4))
        folder = folder or tmp_path / "tried"
        folder.mkdir(exist_ok=True)
        return Study(plan, folder)

    return study


def value(trial: SweepTrial) -> float:
    return 1 - abs(trial.settings["optimizer.lr"] - 0.3)


def shown(study: Study) -> list[tuple[Any, ...]]:
    return [(trial.number, trial.settings, trial.state, trial.value) for trial in study.trials()]


def test_grid_runs_in_order_once(opened):
    study = opened(**GRID)
    assert [trial.state for trial in study.trials()] == ["waiting", "waiting"]
    one, two = study.start_next(), study.start_next()
    assert [one.settings, two.settings] == [{"optimizer.lr": 0.1}, {"optimizer.lr": 0.2}]
    assert study.start_next() is None
    study.finish(1, 0.5)
    study.fail(0, "why")
    found = [(trial.number, trial.state, trial.value, trial.error) for trial in opened(**GRID).trials()]
    assert found == [(0, "failed", None, "why"), (1, "finished", 0.5, None)]
    assert opened(**GRID).start_next() is None


def test_interrupted_trials_come_first(opened):
    fresh = opened(**GRID)
    fresh.start_next()  # then the process is killed
    study = opened(**GRID)
    assert (fresh.resumed, study.resumed) == (False, True)
    assert study.trials()[0].state == "waiting"
    assert [study.start_next().number, study.start_next().number] == [0, 1]


def test_failed_trials_are_retried_in_their_own_folders(opened):
    study = opened(**GRID)
    study.fail(study.start_next().number, "why")
    study.finish(study.start_next().number, 0.5)
    assert study.retry_failed() == 1
    again = study.start_next()
    assert (again.number, again.settings) == (0, {"optimizer.lr": 0.1})
    study.finish(0, 0.7)
    assert shown(study) == [(0, {"optimizer.lr": 0.1}, "finished", 0.7), (1, {"optimizer.lr": 0.2}, "finished", 0.5)]


# A search


def draw(study: Study, most: int = 100) -> None:
    for _ in range(most):
        if (trial := study.start_next()) is None:
            return
        study.finish(trial.number, value(trial))


def test_interrupted_search_draws_the_same_trials(opened, tmp_path):
    unbroken = opened(tmp_path / "unbroken", **SEARCH)
    draw(unbroken)
    draw(opened(**SEARCH), most=3)
    opened(**SEARCH).start_next()  # killed while a trial runs
    study = opened(**SEARCH)
    draw(study)
    assert shown(study) == shown(unbroken)
    assert len({str(trial.settings) for trial in study.trials()}) == 6
    for trial in study.trials():
        assert 0.01 <= trial.settings["optimizer.lr"] <= 1
        assert trial.settings["batch.global"] in (2, 4, 6, 8, 10, 12)
        assert trial.settings["optimizer.name"] in ("sgd", "adam")


@pytest.mark.slow
def test_pruned_trial_has_its_best_value(opened):
    study = opened(**SEARCH, pruner="median", pruner_args={"n_startup_trials": 1})
    first = study.start_next().number
    for epoch in (1, 2):
        study.report(first, epoch, 0.9)
    study.finish(first, 0.9)
    second = study.start_next().number
    for epoch, seen in ((1, 0.4), (2, 0.3)):
        study.report(second, epoch, seen)
    assert study.should_prune(second)
    again = opened(**SEARCH, pruner="median", pruner_args={"n_startup_trials": 1})
    assert again.start_next().number == second, "the sweep was killed before the trial was stopped"
    assert again.reported(second) == {1: 0.4, 2: 0.3}
    assert again.should_prune(second)
    again.prune(second)
    assert [(trial.state, trial.value) for trial in again.trials()] == [("finished", 0.9), ("pruned", 0.4)]


# A changed sweep file


@pytest.mark.slow
def test_larger_grid_adds_trials(opened):
    draw(opened(**GRID))
    study = opened(space={"optimizer.lr": [0.05, 0.1, 0.2, 0.4]})
    assert [trial.state for trial in study.trials()] == ["finished", "finished", "waiting", "waiting"]
    draw(study)
    assert [trial.settings["optimizer.lr"] for trial in study.trials()] == [0.1, 0.2, 0.05, 0.4]


def test_smaller_grid_and_another_space_are_refused(opened):
    draw(opened(**GRID))
    for space, what in (
        ({"optimizer.lr": [0.1]}, "include 1 trial that the space no longer has, such as optimizer.lr=0.2"),
        ({"optimizer.lr": [0.1, 0.2], "optimizer.momentum": [0.5]}, r"space \['optimizer.lr'\] -> "),
    ):
        with pytest.raises(ConfigError, match=what):
            opened(space=space)


@pytest.mark.slow
def test_longer_search_continues(opened):
    draw(opened(**{**SEARCH, "trials": 3}))
    study = opened(**{**SEARCH, "trials": 5})
    before = shown(study)
    draw(study)
    assert shown(study)[:3] == before
    assert len(study.trials()) == 5


def test_trials_of_another_experiment_are_refused(opened):
    draw(opened(**GRID))
    for override, change in (
        ("train.epochs=9", "train.epochs 4 -> 9"), ("model.name=mlp", "model.name linear -> mlp"),
        ("seed=3", "seed 0 -> 3"), ("launch.nproc=2", "launch.nproc 1 -> 2"), ("metric=loss", "metric top1 -> loss"),
        ("optimizer.args={dampening: 0.1}", "different settings (optimizer.args.dampening None -> 0.1)"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="earlier trials were trained with different settings") as caught:
            opened(overrides=(override,), **GRID)
        assert change in str(caught.value)
        assert "name=NAME" in str(caught.value)


@pytest.mark.slow
def test_search_is_not_mixed_with_a_grid(opened):
    draw(opened(**GRID))
    with pytest.raises(ConfigError, match="kind grid -> search"):
        opened(**SEARCH)


def test_settings_without_effect_on_results_may_change(opened):
    draw(opened(**GRID))
    without_effect = ("train.log_every=3", "checkpoint.keep=1", "data.num_workers=1", "parallel=2")
    assert len(opened(overrides=without_effect, **GRID).trials()) == 2
