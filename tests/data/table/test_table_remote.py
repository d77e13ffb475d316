"""Tables behind fsspec: fetched once into the cache, fetched again when the file there is another."""

from __future__ import annotations

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from harness.data.table import remote
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


def test_downloaded_once(tmp_path, downloads):
    for label in ("label", "label", None):
        table = open_table(URL, label=label, cache_dir=tmp_path)
        assert table.strings("path", np.array([1, 0])) == ["b", "a"]
        assert table.where(1) == f"{URL}:3"
    assert downloads == ["/bucket/train.csv"]
    assert not list(tmp_path.rglob("*.tmp"))


def test_rewritten_is_fetched_again(tmp_path, bucket, downloads):
    first = open_table(URL, label="label", cache_dir=tmp_path).digest
    bucket.pipe("/bucket/train.csv", CSV.replace(b"a,1", b"c,1"))  # the same size
    assert open_table(URL, label="label", cache_dir=tmp_path).digest != first
    assert len(downloads) == 2
    assert len(list(tmp_path.rglob("*.source"))) == 1


def test_listings_are_not_believed(tmp_path, monkeypatch, bucket):
    asked = []
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda self, path=None: asked.append(path))
    open_table(URL, cache_dir=tmp_path)
    assert asked


def test_etag_before_dates(monkeypatch):
    info = {"size": 3, "type": "file", "LastModified": "today", "ETag": '"abc"', "created": 1}
    monkeypatch.setattr(MemoryFileSystem, "info", lambda self, path: info)
    assert remote.version(URL) == (3, '"abc"')
    info["LastModified"] = "tomorrow"
    assert remote.version(URL) == (3, '"abc"')
    info["ETag"] = '"abd"'
    assert remote.version(URL) == (3, '"abd"')


def test_changed_during_download(tmp_path, monkeypatch, bucket):
    real = MemoryFileSystem.get_file

    def get_and_change(self, path, target, **options):
        real(self, path, target, **options)
        bucket.pipe(path, CSV + b"c,3\n")

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_and_change)
    with pytest.raises(DataError, match="changed while it was being downloaded"):
        open_table(URL, label="label", cache_dir=tmp_path)
    assert not list(tmp_path.rglob("*.source*"))


def test_download_cut_short(tmp_path, monkeypatch):
    def cut(self, path, target, **options):
        with open(target, "wb") as stream:
            stream.write(CSV[:10])

    monkeypatch.setattr(MemoryFileSystem, "get_file", cut)
    with pytest.raises(DataError, match="10 bytes came, 19 were expected"):
        open_table(URL, label="label", cache_dir=tmp_path)


def test_errors_of_content_name_the_address(tmp_path, bucket):
    bucket.pipe("/bucket/train.csv", CSV + b"c,\n")
    with pytest.raises(DataError, match=r"row 2 \(line 4\)") as caught:
        open_table(URL, label="label", cache_dir=tmp_path)
    assert caught.value.where == f"{URL}:4"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://bucket/nothing.csv", "no such annotation file"),
        ("memory://bucket", "a folder"),
        ("memory://bucket/empty.csv", "empty"),
        ("nonsense://bucket/a.csv", "the address cannot be used"),
    ],
)
def test_addresses_that_lead_nowhere(tmp_path, bucket, url, message):
    bucket.pipe("/bucket/empty.csv", b"")
    with pytest.raises(DataError, match=message) as caught:
        open_table(url, cache_dir=tmp_path)
    assert caught.value.where == url


def test_failures_of_the_back_end_are_data_errors(tmp_path, monkeypatch):
    def fail(self, path):
        raise PermissionError("no credentials")

    monkeypatch.setattr(MemoryFileSystem, "info", fail)
    with pytest.raises(DataError, match="cannot be fetched: PermissionError: no credentials"):
        open_table(URL, cache_dir=tmp_path)
