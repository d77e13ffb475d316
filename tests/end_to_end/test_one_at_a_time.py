"""A run folder has one start at a time, and what is in it is moved aside only for a run that can begin."""

from __future__ import annotations

import json
import sys

import pytest

from harness.errors import ConfigError
from harness.runs import run_dir as folders
from harness.runs.run_dir import RunFolder
from tests.end_to_end.experiment import run, write_config, write_images
from tests.end_to_end.processes import started, wait_for_steps

SLOW = {"name": "tests.end_to_end.models.Slow", "args": {"step_s": 0.2}}


@pytest.fixture(scope="module")
def stripes(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("stripes"))


def test_a_folder_is_held_until_it_is_released(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_HOLD_S", 0.1)
    first, second = RunFolder(tmp_path / "runs" / "a"), RunFolder(tmp_path / "runs" / "a")
    first.hold()
    RunFolder(tmp_path / "runs" / "b").hold()
    with pytest.raises(ConfigError, match="another start is training in this run folder"):
        second.hold()
    first.release()
    second.hold()
    second.release()


@pytest.mark.slow
def test_two_starts_at_once(tmp_path, stripes):
    """The second is refused, and the first does not notice."""
    config = write_config(tmp_path, stripes, model=SLOW, train={"epochs": 100})
    folder = tmp_path / "runs" / "run"
    with started([sys.executable, "driver.py", "-c", config], tmp_path / "first.txt") as first:
        wait_for_steps(folder, 1)
        with started([sys.executable, "driver.py", "-c", config], tmp_path / "second.txt") as second:
            assert second.wait(60) == 2
        assert "another start is training in this run folder" in second.text()
        assert not (folder / "failure.json").exists()
        assert first.process.poll() is None
        first.process.terminate()
        assert first.wait(30) == 75
    assert len(json.loads((folder / "provenance.json").read_text())) == 1


def test_a_run_that_cannot_begin_moves_nothing(tmp_path, stripes):
    config = write_config(tmp_path, stripes, train={"epochs": 1})
    assert run(config, 2) == [0, 0]
    summary = (tmp_path / "runs" / "run" / "summary.json").read_text()
    assert run(config, 2, "batch.global=7") == [2, 2]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()) == ["run"]
    assert (tmp_path / "runs" / "run" / "summary.json").read_text() == summary
    assert not (tmp_path / "runs" / "run" / "failure.json").exists()
    terminal = (tmp_path / "terminal-0.txt").read_text()
    assert "7 rows cannot be dealt to 2 ranks" in terminal
