from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from harness.audit import folders
from harness.audit.folders import Session
from harness.errors import ConfigError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A working folder with code, results and, for a limit of 100 bytes, large data."""
    files = {
        "train.py": 10, "data/a/1.jpg": 80, "data/2.jpg": 80, "corpus/prepare.py": 10, "corpus/train.bin": 200,
        "outputs/old.txt": 200, "weights/net.pth": 200, ".git/HEAD": 5, "env/pyvenv.cfg": 5, "env/bin/python": 5,
        "pkg/__pycache__/x.pyc": 5, "pkg/node_modules/x.js": 5,
    }  # fmt: skip
    for name, size in files.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "project"


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(folders, "DATA_BYTES", 100)


def session(source: Path) -> Session:
    folder = source.parent / "session"
    folder.mkdir()
    return Session(source, folder)


def test_links_data_and_copies_the_rest(source, small):
    made = session(source)
    made.fresh()
    links = {path.relative_to(made.work).as_posix() for path in made.work.rglob("*") if path.is_symlink()}
    assert links == {"data", "corpus/train.bin", ".git", "env", "pkg/node_modules"}
    assert (made.work / "data" / "a" / "1.jpg").samefile(source / "data" / "a" / "1.jpg")
    assert not (made.work / "pkg" / "__pycache__").exists()
    for name in ("train.py", "outputs/old.txt", "weights/net.pth", "corpus/prepare.py"):
        assert (made.work / name).read_bytes() == (source / name).read_bytes()
        assert not (made.work / name).samefile(source / name)
    assert made.copy.size == 10 + 10 + 200 + 200
    assert any("data" in line for line in made.copy.describe())


def test_links_lead_where_they_did(source):
    (source / "beside").symlink_to("../elsewhere")
    (source / "main.py").symlink_to(source / "train.py")
    made = session(source)
    made.fresh()
    assert (made.work / "beside").resolve() == source.parent / "elsewhere"
    assert (made.work / "main.py").resolve() == made.work / "train.py"


def test_a_start_changes_neither_the_source_nor_the_next_start(source):
    made = session(source)
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    made.fresh()
    (made.work / "train.py").write_text("changed")
    (made.work / "new.pt").write_text("new")
    (made.out / "log").write_text("log")
    made.keep("first")
    assert not made.work.exists()
    made.fresh()
    assert not (made.work / "new.pt").exists()
    assert not list(made.out.iterdir())
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
    made.restore("first")
    assert (made.work / "train.py").read_text() == "changed"
    assert os.listdir(made.out) == ["log"]
    (made.out / "log").write_text("longer")
    made.restore("first")
    assert (made.out / "log").read_text() == "log"


def test_works_without_cp(source, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(folders.sys, "platform", "darwin")
    made = session(source)
    made.fresh()
    assert (made.work / "train.py").stat().st_mtime_ns == (source / "train.py").stat().st_mtime_ns


def test_a_large_folder_is_refused_by_name(source, small, monkeypatch):
    monkeypatch.setattr(folders, "MOST_BYTES", 300)
    with pytest.raises(ConfigError, match="outputs") as error:
        session(source)
    assert "weights" in str(error.value)
    assert "data" not in str(error.value)
    assert not (source.parent / "session" / "work").exists()


def test_notices_writes_into_a_link(source, small):
    made = session(source)
    made.fresh()
    assert made.copy.changed_links() == []
    (made.work / "data" / "cache").write_text("")
    assert made.copy.changed_links() == [source / "data"]


def test_another_audit_is_not_copied(source):
    (source / "audit").mkdir()
    made = Session(source, source / "audit")
    made.fresh()
    assert not (made.work / "audit").exists()


def test_a_copy_that_fails_names_both_folders(source, monkeypatch):
    def full(path, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(ConfigError, match="project cannot be copied to .*session: No space left on device") as error:
        session(source)
    assert "--folder" in error.value.hint
