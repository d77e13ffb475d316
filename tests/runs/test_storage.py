"""Stores: files are complete or absent, on disk and behind fsspec, and failures are explained."""

from __future__ import annotations

import errno
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from harness.errors import ConfigError, HarnessError
from harness.runs.storage import LocalStore, copy_run, working_folder
from harness.runs.url_store import UrlStore


@pytest.fixture(params=["folder", "memory", "file"])
def store(request, tmp_path):
    if request.param == "folder":
        yield LocalStore(tmp_path / "runs" / "digits")
        return
    yield UrlStore("memory://bucket/runs/digits/" if request.param == "memory" else f"file://{tmp_path}/runs/digits")
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


def test_files_of_a_store(store, tmp_path):
    assert store.files() == {}
    assert store.read("a/b") == ""
    store.write("a/b", "text")
    (tmp_path / "source").write_bytes(b"12345")
    store.put(tmp_path / "source", "c")
    assert store.read("a/b") == "text"
    store.get("c", tmp_path / "deep" / "down")
    assert (tmp_path / "deep" / "down").read_bytes() == b"12345"
    before = store.files()
    store.put(tmp_path / "source", "a/b")
    assert store.read("a/b") == "12345"
    after = store.files()
    assert set(before) == set(after) == {"a/b", "c"}
    assert [name for name in before if before[name] != after[name]] == ["a/b"]
    store.remove(["a/b", "never there"])
    assert set(store.files()) == {"c"}
    for missing in (lambda: store.get("a/b", tmp_path / "x"), lambda: store.put(tmp_path / "none", "x")):
        with pytest.raises(FileNotFoundError):
            missing()
    assert not (tmp_path / "x").exists()
    assert not list(tmp_path.rglob("*.tmp"))


def test_copy_run_copies_what_has_changed(store, tmp_path):
    local, copied = LocalStore(tmp_path / "local"), {}
    for name in ("metrics.jsonl", "checkpoints/step-2/state.pt", "checkpoints/step-2/manifest.json"):
        local.write(name, name)
    pointers = {"latest": "step-2"}
    copy_run(local, store, {**local.files(), "gone since it was listed": "1"}, pointers, copied)
    assert store.read("metrics.jsonl") == "metrics.jsonl"
    assert store.read("checkpoints/latest") == "step-2\n"
    before = store.files()
    local.write("metrics.jsonl", "longer")
    copy_run(local, store, local.files(), pointers, copied)
    after = store.files()
    assert [name for name in before if before[name] != after[name]] == ["metrics.jsonl"]
    copy_run(store, LocalStore(tmp_path / "back"), after, {"best": "step-2"}, problem=lambda step: "damaged")
    assert LocalStore(tmp_path / "back").read("metrics.jsonl") == "longer"
    assert LocalStore(tmp_path / "back").read("checkpoints/best") == ""


def test_manifest_of_a_checkpoint_with_folders_comes_last(tmp_path):
    local, arrived = LocalStore(tmp_path / "local"), []
    step = "checkpoints/step-8"
    for name in ("manifest.json", "shards/manifest.json", "shards/a", "state.pt", "z/deep/b"):
        local.write(f"{step}/{name}", "")
    local.write("metrics.jsonl", "")

    class Store:
        def put(self, source, name):
            arrived.append(name)

    copy_run(local, Store(), local.files())
    assert (arrived[0], arrived[-1]) == ("metrics.jsonl", f"{step}/manifest.json")


def test_an_interrupted_upload_keeps_the_earlier_file(tmp_path, monkeypatch):
    store = UrlStore(f"file://{tmp_path}/runs/digits")
    store.write("x", "before")
    (tmp_path / "source").write_text("after, and much longer")

    def half(self, source, target, **options):
        Path(target).write_text("aft")
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFileSystem, "put_file", half)
    with pytest.raises(KeyboardInterrupt):
        store.put(tmp_path / "source", "x")
    assert store.read("x") == "before"
    assert set(store.files()) == {"x"}


def test_an_unknown_protocol():
    with pytest.raises(ConfigError) as caught:
        UrlStore("nonsense://bucket/runs")
    assert caught.value.where == "nonsense://bucket/runs"
    assert "s3://BUCKET/runs" in caught.value.hint


@pytest.mark.parametrize("url", ["hdfs://host/runs", "webhdfs://host/runs", "simplecache::smb://host/runs"])
def test_a_store_that_may_lose_files_is_refused(url):
    """fsspec removes a folder of HDFS with all that is in it, where another store refuses to."""
    with pytest.raises(ConfigError, match="cannot keep a run") as caught:
        UrlStore(url)
    assert caught.value.where == url


def test_a_copy_where_the_service_cannot_copy(tmp_path, monkeypatch):
    def refuse(self, source, *others, plain=LocalFileSystem.cp_file, **options):
        if source.endswith("a/b"):  # older versions of fsspec rename by a copy
            raise NotImplementedError  # as fsspec for SFTP
        return plain(self, source, *others, **options)

    monkeypatch.setattr(LocalFileSystem, "cp_file", refuse)
    store = UrlStore(f"file://{tmp_path}/runs/digits")
    store.write("a/b", "text")
    store.copy("a/b", store.sibling("digits.1"))
    assert (tmp_path / "runs" / "digits.1" / "a" / "b").read_text() == "text"
    assert set(store.sibling("digits.1").files()) == {"a/b"}


def test_a_package_that_is_not_installed(monkeypatch):
    def absent(protocol):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.get_filesystem_class", absent)
    with pytest.raises(ConfigError, match="Install s3fs") as caught:
        UrlStore("s3://bucket/runs/digits")
    assert caught.value.hint == "pip install s3fs"


class NoCredentialsError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "exit_code", "hint"),
    [
        (PermissionError("403: Access Denied"), 2, "with permission to list, read, write and delete"),
        (NoCredentialsError("Unable to locate them"), 2, "give every node credentials"),
        (FileNotFoundError("The specified bucket does not exist"), 2, "check that the bucket exists"),
        (ConnectionError("cannot connect"), 70, "check the address and the network"),
        (OSError(errno.ENOSPC, "No space left on device"), 70, "free some space"),
    ],
)
def test_errors_of_a_store_are_explained(monkeypatch, error, exit_code, hint):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(HarnessError) as caught:
        UrlStore("memory://bucket/runs").write("x", "")
    assert caught.value.exit_code == exit_code  # a launcher restarts a run after 70, not after 2
    assert type(error).__name__ in str(caught.value)
    assert hint in caught.value.hint
    assert caught.value.where == "memory://bucket/runs/x"


def test_objects_whose_names_lead_elsewhere_are_left_out(monkeypatch):
    """An object may be named "..", and would be written outside of the folder that the run is copied to."""
    names = ("metrics.jsonl", "../../.bashrc", "logs/../../x", "a..b")
    found = {f"/bucket/run/{name}": {"type": "file", "size": 1} for name in names}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: found)
    assert set(UrlStore("memory://bucket/run").files()) == {"metrics.jsonl", "a..b"}


def test_each_url_has_its_own_working_folder(tmp_path):
    one, other = (working_folder(f"s3://{bucket}/runs/digits", str(tmp_path)) for bucket in ("one", "other"))
    assert one.name == other.name == "digits"
    assert one.parent != other.parent
    assert one.is_relative_to(tmp_path)
