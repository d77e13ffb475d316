"""Which changes make a resumed run another experiment."""

from __future__ import annotations

import pytest

from harness.config import loader
from harness.config.recipe import recipe_difference
from tests.config.test_schema import VALID, make


def changed(**sections):
    return recipe_difference(loader.as_tree(make()), loader.as_tree(make(**sections)))


def test_recipe_difference_names_old_and_new():
    assert changed(seed=4, optimizer={"lr": 0.2}) == {"seed": (0, 4), "optimizer.lr": (0.1, 0.2)}
    assert changed(model={"args": {"width": 8}}) == {"model.args.width": (None, 8)}
    assert recipe_difference({"model": {"args": {}}}, {"model": {"args": None}}) == {"model.args": ({}, None)}
    assert changed(checkpoint={"best_metric": "loss"}) == {"checkpoint.best_metric": (None, "loss")}
    assert recipe_difference({}, {"seed": 1}) == {"seed": (None, 1)}


def test_changes_that_keep_the_recipe():
    found = changed(
        name="y",
        output="elsewhere",
        train={"epochs": 20, "max_steps": 5, "log_every": 1, "evaluate_every": 2, "patience": 1},
        data={"num_workers": 0, "cache_dir": "/tmp"},
        checkpoint={"every": 5, "keep": 1, "resume": "never"},
        runtime={"device": "cpu", "timeout_s": 5.0},
        batch={"global": 8, "eval_per_rank": 3},
        task={**VALID["task"], "cache_gib": 1.0},
        model={"activation_checkpointing": True},
        trackers=["tensorboard"],
        launch={"nproc": 2},
    )
    assert found == {}


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"shard": "global"}},
        {"train": {"ema_decay": 0.9}},
        {"train": {"on_nan": "skip"}},
        {"batch": {"global": 16}},
        {"task": {**VALID["task"], "transforms": {"train": ["RandomHorizontalFlip"]}}},
    ],
)
def test_changes_of_the_recipe(sections):
    assert len(changed(**sections)) == 1
