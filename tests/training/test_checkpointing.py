"""The choice of the checkpoint to resume from. tests/end_to_end/test_resume.py resumes real runs from it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.distributed.runtime import Runtime
from harness.runs.checkpoint import Checkpoints
from harness.training.checkpointing import find
from tests.fixtures import make_config


@pytest.mark.parametrize("resume", ["auto", "s3://bucket/gone/checkpoints/step-7"])
def test_own_checkpoint_comes_first(tmp_path, resume):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    checkpoints.write(8, {"state": {}})
    run = SimpleNamespace(config=make_config(tmp_path, [f"checkpoint.resume={resume}"]), runtime=Runtime(),
                          checkpoints=checkpoints)  # fmt: skip
    assert find(run) == (tmp_path / "checkpoints" / "step-8", True)
    run.config = make_config(tmp_path, ["checkpoint.resume=never"])
    assert find(run) == (None, False)
