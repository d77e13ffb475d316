"""The interface of a task: what a module of the user's must have, and what it finds in one place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.config.schema import TaskSection
from harness.errors import ConfigError
from harness.training.task import open_data


def test_missing_members_are_named():
    opened = SimpleNamespace(**dict.fromkeys(
        ("train", "eval", "summary", "notes", "fingerprint", "label_counts", "model", "prepare", "loss", "evaluate",
         "report"), 1))  # fmt: skip

    class Task(TaskSection):
        def open(self, seed: int, cache_dir: Path | None) -> object:
            return opened

    assert open_data(Task(name="mine"), 0, None) is opened
    del opened.loss, opened.notes
    with pytest.raises(
        ConfigError, match="Task.open of mine returns an object of type SimpleNamespace without notes, loss"
    ):
        open_data(Task(name="mine"), 0, None)


def test_section_without_open_is_reported():
    with pytest.raises(NotImplementedError, match=r"Task does not define open\(seed, cache_dir\)"):
        open_data(TaskSection(name="x"), 0, None)
