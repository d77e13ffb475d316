"""Downloads: kept, replaced, checked, by one process at a time, and what to do offline."""

from __future__ import annotations

import functools
import hashlib
import http.server
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.data import download
from harness.data.download import PublishedFile, fetch, locked
from harness.errors import ConfigError, DataError
from tests.ranks import start, wait_for

CONTENT = bytes(range(256)) * 40
OFFLINE = "http://127.0.0.1:9/"  # the discard port refuses connections


def published(name="a.gz", content=CONTENT, *urls):
    return PublishedFile(name, len(content), hashlib.sha256(content).hexdigest(), urls)


class Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT under any name; only ``cut`` bytes of it if that is set."""

    requests: list
    cut: int | None = None

    def do_GET(self):
        type(self).requests.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: self.cut])

    def log_message(self, *_):
        pass


@contextmanager
def serving(**settings):
    handler = type("Handler", (Server,), {"requests": [], **settings})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=functools.partial(server.serve_forever, 0.01))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_intact_files_are_kept_and_damaged_ones_replaced(tmp_path):
    with serving() as (url, server):
        file = published("a.gz", CONTENT, OFFLINE + "a.gz", url + "a.gz")  # the first mirror is down
        assert fetch([file], tmp_path, None, "x") == ["a.gz"]
        assert fetch([file], tmp_path, None, "x") == []
        (tmp_path / "a.gz").write_bytes(CONTENT[:-1] + b"!")
        assert fetch([file], tmp_path, None, "x") == ["a.gz"]
        (tmp_path / "a.gz").write_bytes(b"half")
        assert fetch([file], tmp_path, url, "x") == ["a.gz"]
        assert fetch([file], tmp_path / "..", url + "a.gz", "x") == ["a.gz"]
    assert server.requests == ["/a.gz"] * 4
    assert (tmp_path / "a.gz").read_bytes() == CONTENT
    assert files(tmp_path) == ["a.gz"]


def test_other_or_truncated_content_is_refused(tmp_path):
    other = published("a.gz", b"?" * len(CONTENT))
    with serving() as (url, _), pytest.raises(DataError, match="SHA-256 mismatch"):
        fetch([other], tmp_path, url, "x")
    shorter = published("a.gz", CONTENT[:300])
    with serving() as (url, _), pytest.raises(DataError, match="301 bytes instead of 300"):
        fetch([shorter], tmp_path, url, "x")
    with serving(cut=5000) as (url, _), pytest.raises(DataError, match="5000 bytes instead of 10240"):
        fetch([other], tmp_path, url, "x")
    assert files(tmp_path) == []


def test_offline_error_lists_the_missing_files(tmp_path):
    missing = [published(name, CONTENT, OFFLINE + name) for name in ("a.gz", "b.gz", "c.gz")]
    (tmp_path / "b.gz").write_bytes(CONTENT)
    with pytest.raises(DataError) as caught:
        fetch(missing, tmp_path, None, "harness data mnist d")
    message = str(caught.value)
    assert f"{tmp_path}: could not get a.gz: {OFFLINE}a.gz: " in message
    assert "put these files into a folder and run harness data mnist d --from FOLDER" in message
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert [line.strip() for line in message.splitlines()[2:]] == [
        f"{name}  10240 bytes  sha256 {digest}" for name in ("a.gz", "c.gz")
    ]
    assert caught.value.exit_code == 65


def test_copy_from_folders_of_any_layout(tmp_path):
    file = published()
    for place in ("flat", "deep/raw", "root/MNIST/raw"):
        source = tmp_path / "from" / place
        source.mkdir(parents=True)
        (source / "a.gz").write_bytes(CONTENT)
        target = tmp_path / "to" / place
        target.mkdir(parents=True)
        assert fetch([file], target, str(tmp_path / "from" / place.split("/")[0]), "x") == ["a.gz"]
    target = tmp_path / "own"
    target.mkdir()
    assert fetch([file], target, str(tmp_path / "from" / "flat" / "a.gz"), "x") == ["a.gz"]
    assert fetch([file], target, str(target), "x") == []
    (target / "a.gz").unlink()
    with pytest.raises(DataError, match="No such file"):
        fetch([file], target, str(target), "x")
    with pytest.raises(ConfigError, match="/nowhere does not exist"):
        fetch([file], target, "/nowhere", "x")


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"), locked(tmp_path / "file" / "d"):
        pass


def _fetch_locked(url: str, folder: str) -> None:
    with locked(Path(folder)):
        fetch([published("a.gz", CONTENT, url + "a.gz")], Path(folder), None, "x")


def test_processes_started_together_download_once(tmp_path):
    with serving() as (url, server):
        ranks = [start(_fetch_locked, (url, str(tmp_path / "d"))) for _ in range(4)]
        assert wait_for(ranks, 60) == [0] * 4
    assert len(server.requests) == 1
    assert files(tmp_path / "d") == [".lock", "a.gz"]


def test_silent_server_times_out(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(DataError, match="timed out"):
            fetch([published()], tmp_path, url, "x")
