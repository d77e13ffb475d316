"""Settings that cannot stand together, and what makes a resumed run another experiment."""

from __future__ import annotations

import inspect
import re

import pytest
from pydantic import ValidationError

from harness import config as module
from harness import configfile
from harness.config import Config, conflicts, flatten, recipe_difference
from harness.tasks.image_csv import Task

VALID = {
    "name": "x",
    "task": {"name": "image_csv", "train_csv": "a", "eval_csv": "b"},
    "batch": {"global": 8},
}


def make(**sections) -> Config:
    return configfile._with_task(Task).model_validate({**VALID, **sections})


# {what is conflicting: (settings, first keys, words of the message, words of the hint)}
CONFLICTS = {
    "no batch": ({"batch": {}}, ["batch.global"], "neither is set", "batch.global=128"),
    "two batches": ({"batch": {"global": 8, "per_rank": 4}}, ["batch.global"], "both are set", "batch.global=128"),
    "uneven micro-batches": ({"batch": {"global": 10, "accumulate": 4}}, ["batch.global"], "10 rows", "12"),
    "uneven micro-batches of a rank": ({"batch": {"per_rank": 3, "accumulate": 2}}, ["batch.global"], "3 rows", "4"),
    "scaling without base": ({"optimizer": {"lr_scaling": "linear"}}, ["optimizer.lr_scaling"], "together", "set both"),
    "base without scaling": ({"optimizer": {"lr_base_batch": 8}}, ["optimizer.lr_scaling"], "together", "neither"),
    "rate said twice": ({"optimizer": {"args": {"lr": 1.0}}}, ["optimizer.args"], "lr is a", "optimizer.lr only"),
    "step without milestones": ({"schedule": {"name": "step"}}, ["schedule.name"], "[]", "schedule.milestones="),
    "milestones without step": ({"schedule": {"milestones": [1]}}, ["schedule.name"], "[1.0]", "schedule.name=step"),
    "milestones that fall": (
        {"schedule": {"name": "step", "milestones": [2, 1]}}, ["schedule.milestones"], "must rise", "sort",
    ),
    "milestones that repeat": (
        {"schedule": {"name": "step", "milestones": [1, 1]}}, ["schedule.milestones"], "must rise", "sort",
    ),
    "endless warm-up": (
        {"schedule": {"warmup_epochs": 11}}, ["schedule.warmup_epochs"], "warm-up of 11.0 epochs", "train.epochs",
    ),
    "floor above peak": ({"schedule": {"min_lr": 0.2}}, ["schedule.min_lr"], "0.2 is above", "lower"),
    "O1 with masters": (
        {"precision": {"opt_level": "O1", "master_weights": True}}, ["precision.opt_level"], "master_weights", "O2",
    ),
    "O4 with batch norm": (
        {"precision": {"opt_level": "O4", "keep_batchnorm_fp32": True}}, ["precision.opt_level"], "batchnorm", "O2",
    ),
    "O1 with a cast model": (
        {"precision": {"opt_level": "O1", "cast_model_type": "float16"}}, ["precision.opt_level"], "cast_model", "O2",
    ),
    "loss scales crossed": (
        {"precision": {"min_loss_scale": 8.0, "max_loss_scale": 4.0}}, ["precision.min_loss_scale"], "above", "swap",
    ),
    "Apex on a CPU": (
        {"precision": {"backend": "apex"}, "runtime": {"device": "cpu"}}, ["precision.backend"], "CPU", "harness",
    ),
    "unknown metric": ({"checkpoint": {"best_metric": "f1"}}, ["checkpoint.best_metric"], "'f1'", "top1, top5, loss"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflict(name):
    sections, keys, words, hint = CONFLICTS[name]
    found = list(conflicts(make(**sections)))
    assert [conflict.keys[0] for conflict in found] == keys
    assert words in found[0].message
    assert hint in found[0].hint


def test_every_conflict_in_the_code_has_a_test():
    written = set(re.findall(r"Conflict\(\s*\(\"([\w.]+)\"", inspect.getsource(module)))
    assert written == {keys[0] for _, keys, _, _ in CONFLICTS.values()}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"batch": {"per_rank": 4, "accumulate": 4}},
        {"optimizer": {"lr_scaling": "sqrt", "lr_base_batch": 256}},
        {"schedule": {"name": "step", "milestones": [1, 2.5]}},
        {"schedule": {"name": "cosine", "warmup_epochs": 10, "min_lr": 0.1}},
        {"precision": {"opt_level": "O2", "master_weights": False, "cast_model_type": "float16"}},
        {"precision": {"opt_level": "O0", "keep_batchnorm_fp32": True}},
        {"precision": {"min_loss_scale": 4.0, "max_loss_scale": 4.0}},
        {"precision": {"backend": "apex"}},
        {"checkpoint": {"best_metric": "mean_class_accuracy"}},
    ],
)
def test_what_stands_together(sections):
    assert list(conflicts(make(**sections))) == []


def test_frozen():
    with pytest.raises(ValidationError):
        make().seed = 3


def test_null_arguments_are_none():
    assert make(model={"args": None}).model.args == {}


@pytest.mark.parametrize("name", ["a b", "../x", "", ".x", "a/b", "-x"])
def test_a_name_that_is_no_folder_name(name):
    with pytest.raises(ValidationError):
        make(name=name)


# Recipe


def test_flatten():
    assert flatten({"a": {"b": {"c": 1}, "d": [1]}, "e": {}, "f": None}) == {"a.b.c": 1, "a.d": [1], "e": {}, "f": None}


def changed(**sections):
    return recipe_difference(configfile.as_tree(make()), configfile.as_tree(make(**sections)))


def test_recipe_difference_names_old_and_new():
    assert changed(seed=4, optimizer={"lr": 0.2}) == {"seed": (0, 4), "optimizer.lr": (0.1, 0.2)}
    assert changed(model={"args": {"width": 8}}) == {"model.args": ({}, None), "model.args.width": (None, 8)}
    assert changed(checkpoint={"best_metric": "loss"}) == {"checkpoint.best_metric": (None, "loss")}
    assert recipe_difference({}, {"seed": 1}) == {"seed": (None, 1)}


def test_what_is_not_the_recipe():
    assert (
        changed(
            name="y",
            output="elsewhere",
            train={"epochs": 20, "max_steps": 5, "log_every": 1, "evaluate_every": 2, "patience": 1},
            data={"num_workers": 0, "cache_dir": "/tmp"},
            checkpoint={"every_steps": 5, "keep": 1, "resume": "never"},
            runtime={"device": "cpu", "timeout_s": 5.0},
            batch={"global": 8, "eval_per_rank": 3},
        )
        == {}
    )


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"shard": "global"}},
        {"train": {"ema_decay": 0.9}},
        {"train": {"on_nan": "skip"}},
        {"batch": {"global": 16}},
        {"task": {**VALID["task"], "augment": {"rotation": 3.0}}},
    ],
)
def test_what_is_the_recipe(sections):
    assert len(changed(**sections)) == 1
