"""Images in tar archives and behind URLs: the same pixels as from files, in any process, and clear errors."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import time
from contextlib import nullcontext
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier, Thread

import fsspec
import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from harness.data import tars
from harness.data.image_checks import ImageChecks
from harness.data.image_files import ImageFiles
from harness.data.images import ImageTable
from harness.data.loader import BatchRequest, Loader
from harness.data.row_labels import ClassLabels
from harness.data.table.table import open_table
from harness.data.url_cache import UrlCache
from harness.errors import DataError
from harness.runs import fetch
from tests.end_to_end.experiment import train
from tests.fixtures import write_rows
from tests.tools.data.test_command import write_table, write_tar

ROWS = 12


def table(folder: Path, root: str, paths: list[str], on_bad_row="stop", cache_gib=1.0) -> ImageTable:
    source = write_table(folder / "t.csv", [(path, row % 3) for row, path in enumerate(paths)])
    opened = open_table(source, text=("path",), label="label", cache_dir=folder / "cache")
    return ImageTable(
        table=opened, files=ImageFiles(root, folder / "cache", cache_gib), path_column="path",
        labels=ClassLabels(opened, np.arange(3), 3), seed=0, channels=1, for_training=v2.Identity(),
        for_evaluation=v2.Identity(), on_bad_row=on_bad_row,
    )  # fmt: skip


def loaded(images: ImageTable, num_workers: int) -> list[torch.Tensor]:
    loader = Loader(images, num_workers, torch.device("cpu"), timeout_s=60)
    try:
        parts = np.array_split(np.arange(len(images)), 4)
        return [batch.inputs for batch in loader.fetch(BatchRequest(rows, 0) for rows in parts)]
    finally:
        loader.close()


@pytest.fixture
def folder(tmp_path):
    write_rows(tmp_path, "train", ROWS)
    return tmp_path


@pytest.fixture
def expected(folder):
    """The images, read from files."""
    return loaded(table(folder, str(folder), [f"train_images/{row}.png" for row in range(ROWS)]), 0)


class Server(ThreadingHTTPServer):
    """Serves a folder; ``asked`` counts the GET requests; ``answer`` may change what happens to one."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        self.answer = lambda handler: None
        server = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self):  # noqa: N802
                server.asked.append(self.path)
                if server.answer(self) is None:
                    super().do_GET()

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def server(folder, monkeypatch):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install aiohttp")
    monkeypatch.setattr(fetch, "_PAUSE_S", 0.01)
    server = Server(folder / "train_images")
    yield server
    server.shutdown()
    server.server_close()


PATHS = [f"{row}.png" for row in range(ROWS)]


# Tar archives


@pytest.fixture
def shards(folder):
    """Two archives, with names that need a long header, and their paths."""
    (folder / "my shards").mkdir()
    deep = f"{'d' * 90}/{'e' * 90}/ü"
    paths = []
    for shard in range(2):
        rows = range(shard * 6, shard * 6 + 6)
        members = {f"{deep}{row}.png": (folder / "train_images" / f"{row}.png").read_bytes() for row in rows}
        write_tar(folder / "my shards" / f"{shard}.tar", members)
        paths += [f"{shard}.tar/{name}" for name in members]
    return paths


@pytest.mark.parametrize("num_workers", [0, 2])
def test_members_are_the_same_images(folder, shards, expected, num_workers):
    images = table(folder, str(folder / "my shards"), shards)
    assert all(map(torch.equal, loaded(images, num_workers), expected))
    ImageChecks(images).require_files(np.arange(ROWS), 5)
    assert ImageChecks(images).sample(np.arange(ROWS), None, 5) == "12 of 12 images decoded (8x8)"


def test_each_archive_is_indexed_once(folder, shards, monkeypatch):
    root = str(folder / "my shards")
    loaded(table(folder, root, shards), 0)
    tars._index.cache_clear()  # as in another process
    monkeypatch.setattr(tars, "members", lambda *_: pytest.fail("the archive is read again"))
    loaded(table(folder, root, shards), 0)
    monkeypatch.undo()
    content = (folder / "train_images" / "7.png").read_bytes()
    write_tar(folder / "my shards" / "0.tar", {shards[0].partition("/")[2]: content})
    assert table(folder, root, shards).batch(np.arange(1), 0).inputs[0, 0, 0, 0] == 7
    assert len(list((folder / "cache" / "tars").glob("*/*.index"))) == 2  # the old index is gone


def test_members_whose_hashes_are_neighbours(folder, monkeypatch):
    """A float64 has one value for both."""
    monkeypatch.setattr(tars, "_hash", lambda name: 2**53 + int(name))
    file = str(write_tar(folder / "near.tar", {"0": b"a", "1": b"b"}))
    found = [bytes(tars.read(file, name, folder / "cache", "near.tar").tolist()) for name in "01"]
    assert found == [b"a", b"b"]


@pytest.mark.parametrize("damage", ["first", "digest", "offset", "last", "truncated", "empty"])
def test_a_damaged_index_is_made_again(folder, shards, expected, caplog, damage):
    root = str(folder / "my shards")
    loaded(table(folder, root, shards), 0)
    for index in (folder / "cache" / "tars").glob("*/*.index"):
        content = bytearray(index.read_bytes())
        if damage in ("truncated", "empty"):
            content = content[: len(content) - 24 if damage == "truncated" else 0]
        else:
            content[{"first": 0, "digest": 31, "offset": 40, "last": -1}[damage]] ^= 1
        index.write_bytes(content)
    tars._index.cache_clear()  # as in another process
    assert all(map(torch.equal, loaded(table(folder, root, shards), 0), expected))
    said = [record.getMessage() for record in caplog.records if "index of the archive" in record.getMessage()]
    assert len(said) == 2  # one line per archive
    assert all("is damaged; making it again" in line for line in said)
    tars._index.cache_clear()
    loaded(table(folder, root, shards), 0)
    assert sum("index of the archive" in record.getMessage() for record in caplog.records) == 2  # now intact


def test_an_index_that_is_never_intact_is_an_error(folder, shards, monkeypatch):
    """The disk damages whatever is written; nothing loops or reads a wrong member."""
    tars._index.cache_clear()
    real = tars.write_atomically
    monkeypatch.setattr(tars, "write_atomically", lambda path, content, mark: real(path, content[:-1] + b"!", mark))
    with pytest.raises(DataError, match="damaged as soon as it is written"):
        ImageFiles(str(folder / "my shards"), folder / "cache").read(shards[0])


def test_machines_that_see_no_locks_of_each_other_index_at_the_same_time(folder, shards, monkeypatch):
    fork, real = get_context("fork"), tars.write_atomically
    both, results = fork.Barrier(2), fork.Queue()

    def unlocked(place, passes):
        place.parent.mkdir(parents=True, exist_ok=True)
        return nullcontext()

    def index():
        try:
            ImageFiles(str(folder / "my shards"), folder / "cache").read(shards[0])
            results.put("done")
        except Exception as error:
            results.put(error)

    monkeypatch.setattr(tars, "made_once", unlocked)
    monkeypatch.setattr(tars, "write_atomically", lambda *arguments: (both.wait(20), real(*arguments)))
    machines = [fork.Process(target=index) for _ in range(2)]
    for machine in machines:
        machine.start()
    assert [results.get(timeout=30) for _ in machines] == ["done"] * 2
    for machine in machines:
        machine.join(10)
    assert not list((folder / "cache").rglob("*.tmp"))


def test_bad_members_and_archives(folder, shards):
    """A member is a bad image, which may be skipped; an archive that cannot be read ends the run."""
    archive = folder / "my shards" / "0.tar"
    broken = write_tar(folder / "my shards" / "b.tar", {"x.png": b"<html>", "e.png": b""})
    for path, message in (
        ("0.tar/gone.png", f"image not found: {archive}/gone.png (the archive {archive} has no member gone.png)"),
        ("9.tar/gone.png", f"image not found: {folder}/my shards/9.tar/gone.png"),
        ("b.tar/x.png", f"image cannot be decoded: {broken}/x.png: "),
        ("b.tar/e.png", f"image cannot be decoded: {broken}/e.png: "),
    ):
        with pytest.raises(DataError) as caught:
            table(folder, str(folder / "my shards"), [shards[0], path]).batch(np.arange(2), 0)
        assert str(caught.value).startswith(f"{folder}/t.csv:3: {message}")
        skipped = table(folder, str(folder / "my shards"), [shards[0], path], "skip").batch(np.arange(2), 0)
        assert skipped.bad == [1]
        assert skipped.rows.tolist() == [0, 0]
    whole, (*_, (_, offset, size)) = archive.read_bytes(), tars.members(str(archive), "")
    end = offset + -(-size // 512) * 512
    twice = write_tar(folder / "twice.tar", {"./a.png": b"1", "b.png": b"2", "a.png": b"3"}).read_bytes()
    for content, message in (
        (whole[:end], "the archive is not complete (it has no end marker)"),
        (whole[: end + 100], "the archive is not complete ("),
        (whole[: offset + 1], "the archive is not complete (it ends inside ddd"),
        (b"", "this is not a tar archive: empty file"),
        (b"x" * 2048, "this is not a tar archive: "),
        (b"\x1f\x8b" + whole, "the archive is compressed with gzip, so its members cannot be read one by one"),
        (twice, "the archive has two members named a.png"),
    ):
        archive.write_bytes(content)
        for on_bad_row in ("stop", "skip"):
            with pytest.raises(DataError) as caught:
                table(folder, str(folder / "my shards"), shards, on_bad_row).batch(np.arange(1), 0)
            assert f"{folder}/t.csv:2: {archive}: {message}" in str(caught.value)


# URLs


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_url_is_asked_for_once(folder, server, expected, num_workers):
    """With workers, which are forked after this process has used fsspec."""
    fsspec.filesystem("http").cat_file(f"{server.url}/0.png")
    server.asked.clear()
    for _ in range(2):
        images = table(folder, f"{server.url}/", PATHS)
        assert all(map(torch.equal, loaded(images, num_workers), expected))
        assert sorted(server.asked) == sorted(f"/{path}" for path in PATHS)
    assert not list((folder / "cache" / "urls").rglob("*.tmp"))
    whole = table(folder, "/nowhere", [f"{server.url}/{path}" for path in PATHS])  # URLs in the table
    assert all(map(torch.equal, loaded(whole, 0), expected))
    assert len(server.asked) == ROWS


def test_downloads_run_at_the_same_time(folder, server):
    together = Barrier(ROWS // 2)
    server.answer = lambda handler: (together.wait(60), None)[1]  # no answer before the others have asked
    table(folder, server.url, PATHS).batch(np.arange(ROWS // 2 * 2), 0)
    assert not together.broken


def test_a_full_cache_is_not_an_error(folder, server, expected, monkeypatch):
    """What fits is kept; copies that nobody has used for a day make room."""
    size = (folder / "train_images" / "0.png").stat().st_size
    old = folder / "cache" / "urls" / "ab" / "old"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"x" * 4 * size)
    (old.parent / "dead.1-2.tmp").write_bytes(b"x" * 4 * size)
    for stale in old.parent.iterdir():
        os.utime(stale, (0, 0))
    for _ in range(2):
        assert all(
            map(torch.equal, loaded(table(folder, server.url, PATHS, cache_gib=5.5 * size / 2**30), 0), expected)
        )
    copies = [path for path in (folder / "cache" / "urls").rglob("*") if path.is_file()]
    assert 3 <= len(copies) <= 6
    assert old not in copies
    assert len(server.asked) == 2 * ROWS - len(copies)


def test_a_worker_keeps_no_image_that_it_has_read(folder, server):
    files = ImageFiles(server.url, folder / "cache")
    files.read_ahead(PATHS)
    concurrent.futures.wait(files._urls._started.values(), timeout=60)
    assert [len(files.read(path)) > 0 for path in PATHS] == [True] * ROWS
    assert not files._urls._started
    assert len(server.asked) == ROWS


def test_a_copy_of_another_user(folder, server, monkeypatch):
    """Its time cannot be set."""
    cache = UrlCache(folder / "urls", 1 << 20)
    content = cache.read(f"{server.url}/0.png")
    for copy in (folder / "urls").glob("??/*"):
        os.utime(copy, (0, 0))

    def utime(*_):
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "utime", utime)
    assert torch.equal(cache.read(f"{server.url}/0.png"), content)


def test_an_archive_in_use_stays_in_a_full_cache(folder, server, shards):
    """Though it is old; and its index stays valid."""
    for archive in (folder / "my shards").iterdir():
        shutil.copy(archive, folder / "train_images")
    files = ImageFiles(server.url, folder / "cache")
    files.copy_archives([files.locate("0.tar"), files.locate("1.tar")])
    for copy in (folder / "cache" / "urls").glob("??/*"):
        os.utime(copy, (0, 0))
    files.read(shards[0])
    index = list((folder / "cache" / "tars").glob("*/*.index"))
    ImageFiles(server.url, folder / "cache", cache_gib=1e-9).read("0.png")
    server.asked.clear()
    files.read(shards[0])
    assert not server.asked
    assert list((folder / "cache" / "tars").glob("*/*.index")) == index
    files.copy_archives([files.locate("1.tar")])
    assert server.asked == ["/1.tar"]


def test_failures_of_a_url(folder, server, monkeypatch):
    """A missing image is a bad image; a server that fails is not the fault of a row."""
    images = table(folder, server.url, [PATHS[0], "gone.png"])
    with pytest.raises(
        DataError, match=f"t.csv:3: image not found: {server.url}/gone.png\n  -> paths in the CSV are relative"
    ):
        images.batch(np.arange(2), 0)
    assert table(folder, server.url, [PATHS[0], "gone.png"], "skip").batch(np.arange(2), None).bad == [1]
    server.asked.clear()
    server.answer = lambda handler: handler.send_error(503) or True
    for on_bad_row in ("stop", "skip"):
        with pytest.raises(DataError) as caught:
            table(folder, server.url, ["1.png"], on_bad_row).batch(np.arange(1), 0)
        assert f"t.csv:2: {server.url}/1.png: the file cannot be read: ClientResponseError: 503" in str(caught.value)
    assert server.asked == ["/1.png"] * 2 * fetch.ATTEMPTS
    monkeypatch.setattr(fetch, "TIMEOUT_S", 0.2)
    server.answer = lambda handler: time.sleep(1.0)
    with pytest.raises(DataError, match=r"2.png: the file cannot be read: no answer within 0.2 s\n  -> check the"):
        table(folder, server.url, ["2.png"]).batch(np.arange(1), 0)
    for root, message in (
        ("http://127.0.0.1:9/x", "cannot be read: ClientConnector"),
        ("nosuch://x", "cannot be read: ValueError: Protocol not known"),
    ):
        with pytest.raises(DataError, match=message):
            table(folder, root, ["2.png"], "skip").batch(np.arange(1), 0)


def test_an_error_then_success_is_retried(folder, server, expected):
    failed = set()

    def fail_once(handler):
        if handler.path not in failed:
            failed.add(handler.path)
            handler.send_error(500)
            return True
        return None

    server.answer = fail_once
    assert all(map(torch.equal, loaded(table(folder, server.url, PATHS), 0), expected))


def test_archives_behind_a_url(folder, server, shards, expected):
    """Each is downloaded once, whatever the number of workers; one that does not fit is refused."""
    for archive in (folder / "my shards").iterdir():
        shutil.copy(archive, folder / "train_images")
    assert all(map(torch.equal, loaded(table(folder, server.url, shards), 2), expected))
    assert sorted(server.asked) == ["/0.tar", "/1.tar"]
    shutil.rmtree(folder / "cache" / "urls")
    with pytest.raises(DataError, match="has no space for this archive .*\n  -> raise task.cache_gib"):
        table(folder, server.url, shards, cache_gib=1e-6).batch(np.arange(1), 0)
    with pytest.raises(DataError, match="image not found: .*/7.tar/a.png"):
        table(folder, server.url, ["7.tar/a.png"]).batch(np.arange(1), 0)


def test_archives_are_copied_before_the_workers_start(folder, server, shards, expected):
    """Those that rows of this rank name, in paths or below the root, each once by all ranks of the machine."""
    for archive in (folder / "my shards").iterdir():
        shutil.copy(archive, folder / "train_images")
    urls = [f"{server.url}/{path}" for path in shards]
    images, whole = table(folder, server.url, [*shards, "7.tar/gone.png"]), table(folder, "/nowhere", urls)
    assert images.archives(0, 6) == whole.archives(0, 6) == {f"{server.url}/0.tar"}
    assert images.archives(0, 0) == table(folder, str(folder / "my shards"), shards).archives(0, ROWS) == set()
    both = whole.archives(0, ROWS)
    assert both == {f"{server.url}/{shard}.tar" for shard in range(2)}
    ranks = [Thread(target=images.files.copy_archives, args=(sorted(images.archives(0, ROWS + 1)),)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [path for path in sorted(server.asked) if "7" not in path] == ["/0.tar", "/1.tar"]
    server.answer = lambda handler: handler.send_error(403) or True
    assert all(map(torch.equal, loaded(whole, 2), expected))
    shutil.rmtree(folder / "cache" / "urls")
    server.answer = lambda handler: None
    small = table(folder, server.url, shards, cache_gib=1e-6)
    with pytest.raises(DataError, match="has no space for this archive"):
        small.files.copy_archives(sorted(both))


@pytest.mark.slow
def test_a_slow_archive_does_not_end_the_run(folder, server, shards):
    """It takes longer than a rank may be silent."""
    limit_s = 10.0
    for archive in (folder / "my shards").iterdir():
        shutil.copy(archive, folder / "train_images")
    for name, paths in (("train", shards), ("eval", shards[:6])):
        write_table(folder / f"{name}.csv", [(path, row % 3) for row, path in enumerate(paths)])

    def slowly(handler):
        until = time.monotonic() + limit_s + 1
        while "1.tar" in handler.path and time.monotonic() < until:
            time.sleep(0.05)

    server.answer = slowly
    train(
        folder / "experiment", folder, 1, "data.num_workers=1", f"runtime.timeout_s={limit_s:g}",
        f"task.root={server.url}", "task.on_bad_row=skip", "task.transforms={}", "train.epochs=1",
    )  # fmt: skip


def test_file_systems_in_memory_and_missing_roots(folder, expected):
    memory = fsspec.filesystem("memory")
    for path in PATHS:
        memory.pipe_file(f"/bucket/{path}", (folder / "train_images" / path).read_bytes())
    try:
        assert all(map(torch.equal, loaded(table(folder, "memory://bucket", PATHS), 0), expected))
    finally:
        memory.rm("/bucket", recursive=True)
    assert all(map(torch.equal, loaded(table(folder, f"file://{folder}/train_images", PATHS), 0), expected))
    with pytest.raises(
        DataError, match=r"task.root: the folder .*/train_imagse does not exist\n  -> did you mean /.*/train_images\?"
    ):
        ImageChecks(table(folder, str(folder / "train_imagse"), PATHS)).require_files(np.arange(1), 1)


def test_names_are_quoted_below_a_web_server_only():
    for name, quoted in (("a#b.png", "a%23b.png"), ("a?.png", "a%3F.png"), ("50%41.png", "50%2541.png")):
        assert ImageFiles("https://host/x").locate(name) == f"https://host/x/{quoted}"
        assert ImageFiles("s3://host/x").locate(name) == f"s3://host/x/{name}"
    assert ImageFiles("https://host").locate("a#.tar/b#.png") == "https://host/a%23.tar/b#.png"
