"""Atomic writes: the old file or the new one, never half of one."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from harness.runs.files import commit, replacing, temporary_for, write_atomically


def test_an_error_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomically(path, "first ä")

    def half() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"second")
    assert path.read_text() == "first ä"
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_follow_the_umask(tmp_path):
    """Also where the writer makes private files, as safetensors does."""
    before = os.umask(0o022)
    try:
        with replacing(tmp_path / "w.safetensors") as temporary:
            save_file({"w": torch.ones(1)}, temporary)
    finally:
        os.umask(before)
    assert (tmp_path / "w.safetensors").stat().st_mode & 0o777 == 0o644


def test_a_folder_gets_its_name_when_it_is_complete(tmp_path):
    final = tmp_path / "step-1"
    temporary_for(final).mkdir()
    (temporary_for(final) / "state.pt").write_text("x")
    commit(temporary_for(final), final)
    assert [path.name for path in tmp_path.rglob("*")] == ["step-1", "state.pt"]
