"""Atomic writes: the old file or the new one, never half of one."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from harness.errors import ConfigError
from harness.runs import files
from harness.runs.files import (
    cache_folder,
    commit,
    default_cache_dir,
    replacing,
    require_output,
    temporary_for,
    write_atomically,
)


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


def test_a_planted_link_is_not_followed(tmp_path):
    """In the run folder of someone else, the temporary name may be a link to a file of this user."""
    (tmp_path / "mine").write_text("mine")
    temporary_for(tmp_path / "report.html").symlink_to(tmp_path / "mine")
    write_atomically(tmp_path / "report.html", "page")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "report.html").read_text() == "page"


# The output that a user names


def test_outputs_that_would_replace_something_are_refused(tmp_path):
    rows, run = tmp_path / "a.csv", tmp_path / "runs" / "digits"
    rows.write_text("path\n")
    os.link(rows, tmp_path / "hard.csv")
    (tmp_path / "soft.csv").symlink_to(rows)
    (tmp_path / "b.csv.tmp").write_text("path\n")
    os.mkfifo(tmp_path / "pipe.csv")
    (run / "checkpoints" / "step-3").mkdir(parents=True)
    (run / "weights.safetensors").write_text("")
    (tmp_path / "sweep" / "trials").mkdir(parents=True)
    same = f"it would replace {rows}, which this command reads"
    for out, inputs, problem in [
        (rows, [rows], same),
        (tmp_path / "hard.csv", [rows], same),
        (tmp_path / "soft.csv", ["", "no such", rows], same),
        (tmp_path / "runs" / ".." / "a.csv", [rows], same),
        (tmp_path / "b.csv", [tmp_path / "b.csv.tmp"], "b.csv.tmp, which this command reads"),
        (tmp_path / "pipe.csv", [], "it is a device or a pipe"),
        (Path("/dev/null"), [], "it is a device or a pipe"),
        (tmp_path, [], "it is a folder"),
        (tmp_path / "no" / "x.csv", [], "there is no folder"),
        (run / "weights.safetensors", [], "it would replace weights.safetensors of"),
        (run / "checkpoints" / "step-3" / "state.pt", [], "it would replace checkpoints of"),
        (tmp_path / "sweep" / "sweep.json", [], "it would replace sweep.json of"),
    ]:
        with pytest.raises(ConfigError) as caught:
            require_output(out, inputs)
        assert problem in str(caught.value), out
    (tmp_path / "model.onnx.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"replace .*model.onnx.json, which this command reads"):
        require_output(tmp_path / "model.onnx", [tmp_path / "model.onnx.json"], also=".json")
    for fine in (tmp_path / "new.csv", run / "report.html", run / "model.onnx", tmp_path / "weights.safetensors"):
        require_output(fine, [rows, tmp_path])


def test_a_missing_folder_of_an_output_is_to_be_made(tmp_path):
    with pytest.raises(ConfigError, match=rf"there is no folder (.*)\n  -> mkdir -p {tmp_path}/none"):
        files.require_output(tmp_path / "none" / "x.csv", [])


def test_a_folder_gets_its_name_when_it_is_complete(tmp_path):
    final = tmp_path / "step-1"
    temporary_for(final).mkdir()
    (temporary_for(final) / "state.pt").write_text("x")
    commit(temporary_for(final), final)
    assert [path.name for path in tmp_path.rglob("*")] == ["step-1", "state.pt"]


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A user without a home folder that can be written, and with a folder for temporary files."""
    for name in ("APEX_HARNESS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files, "_reported", set())

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    return tmp_path / f"apex-harness-{os.getuid()}"


def test_without_a_home_folder_the_cache_is_temporary(nowhere, caplog):
    assert default_cache_dir() == cache_folder() == nowhere
    assert nowhere.stat().st_mode & 0o777 == 0o700
    assert len(caplog.records) == 1


def test_with_a_home_folder_that_cannot_be_written_too(nowhere, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert default_cache_dir() == nowhere or Path("/.cache/apex-harness").exists()


@pytest.mark.parametrize("kind", ["writable by others", "a link", "a file"])
def test_a_temporary_cache_is_of_this_user_alone(nowhere, tmp_path, kind):
    """It has the list of trusted runs."""
    if kind == "writable by others":
        nowhere.mkdir()
        nowhere.chmod(0o777)
    elif kind == "a link":
        nowhere.symlink_to(tmp_path)
    else:
        nowhere.touch()
    with pytest.raises(ConfigError) as caught:
        default_cache_dir()
    assert caught.value.where == str(nowhere)


def test_a_path_in_a_home_folder_that_is_unknown(monkeypatch):
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", mock.Mock(side_effect=KeyError("uid not found")))
    with pytest.raises(ConfigError) as caught:
        cache_folder("~/cache")
    assert caught.value.where == "~/cache"
