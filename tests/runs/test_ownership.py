"""Which runs are the user's own."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from harness.runs import ownership
from harness.runs.run_dir import RunFolder
from tests.fixtures import make_config


def test_only_this_user_says_which_runs_are_own(tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "cache"))
    run, known = tmp_path / "run", tmp_path / "cache" / f"own-configurations-{os.getuid()}"
    run.mkdir()
    (run / "config.yaml").write_text("name: x\n")
    assert not ownership.is_own(run)
    before = os.umask(0)
    try:
        ownership.remember("name: x\n")
        ownership.remember("name: x\n")
    finally:
        os.umask(before)
    assert known.read_text().count("\n") == 1
    assert stat.S_IMODE(known.stat().st_mode) == 0o600
    assert ownership.is_own(run)
    known.chmod(0o620)
    assert not ownership.is_own(run), "others may have written it"
    known.unlink()
    known.mkdir()
    ownership.remember("name: x\n")  # does not fail
    assert not ownership.is_own(run)


def test_a_start_makes_its_run_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "cache"))
    folder = RunFolder(tmp_path / "runs" / "small")
    folder.claim(make_config(tmp_path))
    assert ownership.is_own(folder.path)
    folder.claim(make_config(tmp_path, train={"epochs": 20}))
    assert ownership.is_own(folder.path.rename(tmp_path / "moved"))
    assert not ownership.is_own(tmp_path), "this configuration was written by hand"


def test_without_a_home_the_temporary_cache_has_the_list(tmp_path, monkeypatch):
    """As in a container that runs under any user id."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("APEX_HARNESS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    (tmp_path / "config.yaml").write_text("name: x\n")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert not ownership.is_own(tmp_path)
    ownership.remember("name: x\n")
    assert ownership.is_own(tmp_path)
    (tmp_path / f"apex-harness-{os.getuid()}").chmod(0o777)  # others can write it
    assert not ownership.is_own(tmp_path)
