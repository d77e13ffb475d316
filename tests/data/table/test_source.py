"""Tables behind fsspec: downloaded once into the cache, and again when the remote file changes."""

from __future__ import annotations

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from harness.data.table.source import locate
from harness.data.table.table import open_table
from harness.errors import DataError

URL = "memory://bucket/train.csv"
CSV = b"path,label\na,1\nb,2\n"


@pytest.fixture(autouse=True)
def bucket():
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/train.csv", CSV)
    yield memory
    memory.rm("/bucket", recursive=True)


@pytest.fixture
def downloads(monkeypatch):
    found, real = [], MemoryFileSystem.get_file
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda *a, **k: (found.append(a[1]), real(*a, **k)))
    return found


def test_file_is_downloaded_once(tmp_path, downloads):
    for label in ("label", "label", None):
        table = open_table(URL, label=label, cache_dir=tmp_path)
        assert table.strings("path", np.array([1, 0])) == ["b", "a"]
        assert table.where(1) == f"{URL}:3"
    assert downloads == ["/bucket/train.csv"]
    assert not list(tmp_path.rglob("*.tmp"))


def test_changed_file_is_downloaded_again(tmp_path, bucket, downloads):
    first = open_table(URL, label="label", cache_dir=tmp_path).digest
    bucket.pipe("/bucket/train.csv", CSV.replace(b"a,1", b"c,1"))  # the same size
    assert open_table(URL, label="label", cache_dir=tmp_path).digest != first
    assert len(downloads) == 2
    assert len(list(tmp_path.rglob("*.source"))) == 2  # until the old one is a day old


def test_cached_listings_are_ignored(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda self, path=None: calls.append(path))
    open_table(URL, cache_dir=tmp_path)
    assert calls


def test_version_prefers_the_etag_to_dates(monkeypatch):
    info = {"size": 3, "type": "file", "LastModified": "today", "ETag": '"abc"', "created": 1}
    monkeypatch.setattr(MemoryFileSystem, "info", lambda self, path: info)
    assert locate(URL).version == (3, '"abc"')
    info["LastModified"] = "tomorrow"
    assert locate(URL).version == (3, '"abc"')
    info["ETag"] = '"abd"'
    assert locate(URL).version == (3, '"abd"')


@pytest.mark.parametrize("mark", ["Last-Modified", "Content-MD5", "Digest"])
def test_version_has_the_marks_of_http_servers(monkeypatch, mark):
    monkeypatch.setattr(MemoryFileSystem, "info", lambda self, path: {"size": 3, "type": "file", mark: "new"})
    assert locate(URL).version == (3, "new")


def test_change_during_the_download_is_an_error(tmp_path, monkeypatch, bucket):
    real = MemoryFileSystem.get_file

    def get_and_change(self, path, target, **options):
        real(self, path, target, **options)
        bucket.pipe(path, CSV + b"c,3\n")

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_and_change)
    with pytest.raises(DataError, match="changed while it was being read"):
        open_table(URL, label="label", cache_dir=tmp_path)
    assert not list(tmp_path.rglob("*.source"))


def test_file_that_vanishes_before_the_download(tmp_path, monkeypatch, bucket):
    def vanish(self, path, target, **options):
        bucket.pipe("/bucket/other.csv", CSV)
        bucket.rm(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(MemoryFileSystem, "get_file", vanish)
    with pytest.raises(DataError, match="changed while it was being read"):
        open_table(URL, label="label", cache_dir=tmp_path)


def test_damaged_conversion_is_made_again_of_the_same_download(tmp_path, monkeypatch, bucket):
    open_table(URL, label="label", cache_dir=tmp_path)
    next(tmp_path.rglob("*.arrow")).write_bytes(b"")
    monkeypatch.setattr(MemoryFileSystem, "get_file", None)
    assert len(open_table(URL, label="label", cache_dir=tmp_path)) == 2


def test_errors_in_the_content_name_the_url(tmp_path, bucket):
    bucket.pipe("/bucket/train.csv", CSV + b"c,\n")
    with pytest.raises(DataError, match=r"\(1 of 3\): line 4") as caught:
        open_table(URL, label="label", cache_dir=tmp_path)
    assert caught.value.where == f"{URL}:4"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://bucket/nothing.csv", "no such annotation file"),
        ("memory://bucket", "a folder"),
        ("memory://bucket/empty.csv", "empty"),
        ("nonsense://bucket/a.csv", "Protocol not known"),
    ],
)
def test_unusable_urls(tmp_path, bucket, url, message):
    bucket.pipe("/bucket/empty.csv", b"")
    with pytest.raises(DataError, match=message) as caught:
        open_table(url, cache_dir=tmp_path)
    assert caught.value.where == url


def test_failure_of_the_back_end_is_a_data_error(tmp_path, monkeypatch):
    def fail(self, path):
        raise PermissionError("no credentials")

    monkeypatch.setattr(MemoryFileSystem, "info", fail)
    with pytest.raises(DataError, match="cannot be read: PermissionError: no credentials"):
        open_table(URL, cache_dir=tmp_path)
