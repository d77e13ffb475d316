"""The sections of a configuration."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from harness.config import loader
from harness.config.schema import Config
from harness.tasks.image_csv.config import Task

VALID = {
    "name": "x",
    "task": {"name": "image_csv", "train_csv": "a", "eval_csv": "b"},
    "batch": {"global": 8},
}


def make(**sections) -> Config:
    schedule = loader.schedule_class(sections.get("schedule"))
    return loader.config_class(Task, schedule).model_validate({**VALID, **sections})


def test_frozen():
    with pytest.raises(ValidationError):
        make().seed = 3


def test_null_arguments_are_empty():
    assert make(model={"args": None}).model.args == {}
