"""What is exported is what was saved, or it is said what is wrong. Whole exports: end_to_end."""

from __future__ import annotations

import pytest
from torch import nn

from harness.errors import CheckpointError
from harness.inference import export
from harness.training import build


def test_a_file_of_weights_that_is_cut_short(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "build_model", lambda config, task: nn.Linear(1, 1))
    (tmp_path / "weights.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"weights\.safetensors: the best weights cannot be read"):
        export._subject(tmp_path, None, None)
