"""The interface of a task: what a module of the user's must have, and what it finds in one place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.config.schema import TaskSection
from harness.errors import ConfigError
from harness.training.task import open_data, row_seed, seeded_torch


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


def test_row_seeds_depend_on_seed_epoch_and_row():
    seeds = {row_seed(*key) for key in np.ndindex(2, 3, 4)}
    assert len(seeds) == 24
    assert row_seed(0, 1, 2) == row_seed(0, 1, 2)


def test_seeded_torch_restores_the_stream():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    first = torch.rand(1)
    with seeded_torch(row_seed(0, 1, 2)):
        inner = torch.rand(1)
    with seeded_torch(row_seed(0, 1, 2)):
        assert torch.equal(torch.rand(1), inner)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)
