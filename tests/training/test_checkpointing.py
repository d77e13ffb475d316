"""The checkpoint to resume from, and a log that was damaged since. tests/end_to_end/test_resume.py has the rest."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from harness import cli
from harness.distributed.runtime import Runtime
from harness.errors import CheckpointError
from harness.runs.checkpoint import Checkpoints
from harness.training.checkpointing import find, restore, save
from tests.fixtures import make_config, settings, write_rows, write_yaml
from tests.ranks import run_ranks


@pytest.mark.parametrize("resume", ["auto", "s3://bucket/gone/checkpoints/step-7"])
def test_own_checkpoint_comes_first(tmp_path, resume):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    checkpoints.write(8, {"state": {}})
    run = SimpleNamespace(config=make_config(tmp_path, [f"checkpoint.resume={resume}"]), runtime=Runtime(),
                          checkpoints=checkpoints)  # fmt: skip
    assert find(run) == (tmp_path / "checkpoints" / "step-8", True)
    run.config = make_config(tmp_path, ["checkpoint.resume=never"])
    assert find(run) == (None, False)


def test_a_state_of_another_version_is_named_with_its_checkpoint(tmp_path, built):
    """It must not end a rank with a bare TypeError."""
    for name in ("train", "eval"):
        write_rows(tmp_path, name, 4)
    run = built(make_config(tmp_path, train={"deterministic": False}))
    save(run)
    folder = run.checkpoints.folder
    content = run.checkpoints.read(folder / "step-0", False, lambda key, size: None)
    run.checkpoints.write(1, {**content, "state": {**content["state"], "later": 1}})
    with pytest.raises(CheckpointError, match=re.escape(f"{folder}/step-1: ") + ".*'later'"):
        restore(run, folder / "step-1")


def test_a_resume_notices_that_the_log_was_damaged(tmp_path):
    """The checkpoint has its digest."""
    for name, rows in (("train", 8), ("eval", 4)):
        write_rows(tmp_path, name, rows)
    config = write_yaml(tmp_path / "config.yaml", settings(tmp_path, train={"epochs": 1, "deterministic": False}))
    assert run_ranks(1, cli.main, ["train", "-c", str(config)], group=False) == [0]
    log = tmp_path / "runs" / "small" / "metrics.jsonl"
    log.write_text(log.read_text().replace('"lr": 0.1', '"lr": 0.2', 1))
    assert run_ranks(1, cli.main, ["train", "-c", str(config), "train.epochs=2"], group=False) == [0]
    assert '"lr": 0.2' in log.with_name("metrics.jsonl.damaged").read_text()
