"""Folders behind fsspec: files whole or not at all, and what is said where a store refuses."""

from __future__ import annotations

import errno
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from harness.errors import ConfigError
from harness.runs.storage import UrlFolder, working_folder


@pytest.fixture(params=["memory", "file"])
def folder(request, tmp_path):
    yield UrlFolder("memory://bucket/runs/digits/" if request.param == "memory" else f"file://{tmp_path}/runs/digits")
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


def test_files_come_and_go(folder, tmp_path):
    assert folder.sizes() == {}
    assert folder.read("a/b") is None
    folder.write("a/b", "text")
    (tmp_path / "source").write_bytes(b"12345")
    told = []
    folder.put(tmp_path / "source", "c", lambda: told.append(1))
    assert told
    assert folder.sizes() == {"a/b": 4, "c": 5}
    assert folder.read("a/b") == "text"
    folder.get("c", tmp_path / "deep" / "down")
    assert (tmp_path / "deep" / "down").read_bytes() == b"12345"
    mark = folder.mark("c")
    folder.put(tmp_path / "source", "a/b")
    assert folder.read("a/b") == "12345"
    assert folder.mark("c") == mark
    folder.remove(["a/b", "never there"])
    assert folder.sizes() == {"c": 5}
    with pytest.raises(ConfigError):
        folder.get("a/b", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    assert not list(tmp_path.rglob("*.tmp"))


def test_neighbours_are_others(folder, tmp_path):
    folder.write("x", "1")
    aside = folder.beside("digits.1")
    assert aside.sizes() == {}
    folder.copy("x", aside)
    assert aside.url.endswith("/runs/digits.1")
    folder.write("x", "2")
    assert (aside.read("x"), folder.read("x")) == ("1", "2")


def test_half_a_file_is_none(tmp_path, monkeypatch):
    """Killed in the middle of an upload, the file that was there before is there still. Object stores do it so."""
    folder = UrlFolder(f"file://{tmp_path}/runs/digits")
    folder.write("x", "before")
    (tmp_path / "source").write_text("after, and much longer")

    def half(self, source, target, **options):
        Path(target).write_text("aft")
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFileSystem, "put_file", half)
    with pytest.raises(KeyboardInterrupt):
        folder.put(tmp_path / "source", "x")
    assert folder.read("x") == "before"
    assert folder.sizes() == {"x": 6}


def test_a_protocol_that_nobody_knows():
    with pytest.raises(ConfigError) as caught:
        UrlFolder("nonsense://bucket/runs")
    assert caught.value.where == "nonsense://bucket/runs"
    assert "s3://BUCKET/runs" in caught.value.hint


def test_a_package_that_is_not_installed(monkeypatch):
    def absent(protocol):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.get_filesystem_class", absent)
    with pytest.raises(ConfigError, match="Install s3fs") as caught:
        UrlFolder("s3://bucket/runs/digits")
    assert caught.value.hint == "pip install s3fs"


class NoCredentialsError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (PermissionError("403: Access Denied"), "the right to list, read, write and delete"),
        (NoCredentialsError("Unable to locate them"), "give every node the keys"),
        (FileNotFoundError("The specified bucket does not exist"), "is there such a bucket"),
        (ConnectionError("cannot connect"), "check the address and the network"),
        (OSError(errno.ENOSPC, "No space left on device"), "free some space"),
    ],
)
def test_what_a_store_says_is_told(monkeypatch, error, hint):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(ConfigError) as caught:
        UrlFolder("memory://bucket/runs").write("x", "")
    assert type(error).__name__ in str(caught.value)
    assert hint in caught.value.hint
    assert caught.value.where == "memory://bucket/runs/x"


def test_each_url_has_a_working_folder_of_its_own(tmp_path):
    one, other = (working_folder(f"s3://{bucket}/runs/digits", str(tmp_path)) for bucket in ("one", "other"))
    assert one.name == other.name == "digits"
    assert one.parent != other.parent
    assert one.is_relative_to(tmp_path)
