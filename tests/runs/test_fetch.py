"""Copies of files behind URLs: complete, made once, made again when damaged, and what to do where they fail."""

from __future__ import annotations

import hashlib
import http.server
import os
import signal
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from harness.errors import DataError
from harness.runs import fetch
from harness.runs.files import sha256
from tests.ranks import start, wait_for

CONTENT = bytes(range(256)) * 8192  # more than a block


class Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT under any name. ``answers``: bytes of it, or status codes, for the first requests."""

    requests: list
    answers: list

    def do_GET(self):
        type(self).requests.append(self.path)
        answer = self.answers.pop(0) if self.answers else len(CONTENT)
        self.send_response(200 if answer is None or answer >= 1000 else answer)
        if answer is not None:
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[:answer])

    def log_message(self, *_):
        pass


@contextmanager
def serving(*answers):
    handler = type("Handler", (Server,), {"requests": [], "answers": list(answers)})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/a", handler.requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def is_intact(path: Path) -> bool:
    return sha256(path) == hashlib.sha256(CONTENT).hexdigest()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(fetch, "_PAUSE_S", 0.01)


@pytest.mark.parametrize("protocol", ["http", "memory", "file", "path"])
def test_a_copy_is_made_once_and_again_when_damaged(tmp_path, protocol, monkeypatch, caplog):
    with serving() as (address, _):
        (tmp_path / "there").write_bytes(CONTENT)
        fsspec.filesystem("memory").pipe_file("/there", CONTENT)
        place = {"memory": "memory://there", "file": f"file://{tmp_path}/there", "path": str(tmp_path / "there")}
        url, target, sizes = place.get(protocol, address), tmp_path / "cache" / "copy", []
        for damaged in (None, b"half", CONTENT[:-1] + b"!"):
            if damaged:
                target.write_bytes(damaged)
            assert fetch.fetched(url, target, is_intact, sizes.append) == target
            assert target.read_bytes() == CONTENT
    assert sizes == [len(CONTENT)] * 3
    assert sum("is damaged" in record.getMessage() for record in caplog.records) == 2
    assert fetch.fetched("http://127.0.0.1:9/gone", target, is_intact) == target  # nobody is asked
    assert files(tmp_path / "cache") == ["copy", "copy.lock"]


@pytest.mark.parametrize("answers", [[503], [100_000], [503, 100_000]])
def test_a_failed_or_torn_transfer_is_repeated(tmp_path, answers):
    with serving(*answers) as (url, requests):
        assert fetch.fetched(url, tmp_path / "copy").read_bytes() == CONTENT
    assert len(requests) == len(answers) + 1


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ([100_000] * 3, DataError, "100000 bytes received, 2097152 expected"),
        ([503] * 3, DataError, "OSError: 503 Service Unavailable\n  -> check the address and the network"),
        ([403], DataError, "PermissionError: Forbidden\n  -> give every node credentials"),
        ([404], FileNotFoundError, "Not Found"),
        ([None], DataError, "the digest differs"),  # a server that does not tell the length
    ],
)
def test_what_cannot_be_copied_leaves_no_file(tmp_path, answers, error, message):
    with serving(*answers) as (url, requests), pytest.raises(error, match=message) as caught:
        fetch.fetched(url, tmp_path / "copy", lambda path: is_intact(path) and answers != [None])
    assert len(requests) == len(answers)
    assert url in str(caught.value)
    assert files(tmp_path) == ["copy.lock"]


def test_a_torn_transfer_of_a_back_end_is_noticed(tmp_path, monkeypatch):
    fsspec.filesystem("memory").pipe_file("/there", CONTENT)
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda self, _, target, **__: Path(target).write_bytes(b"half"))
    with pytest.raises(DataError, match="4 bytes received, 2097152 expected"):
        fetch.fetched("memory://there", tmp_path / "copy")
    assert files(tmp_path) == ["copy.lock"]


def test_a_silent_back_end_or_server_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "TIMEOUT_S", 0.2)
    ended = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda *_, **__: ended.wait(60))
    fsspec.filesystem("memory").pipe_file("/there", CONTENT)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for url in (f"http://127.0.0.1:{silent.getsockname()[1]}/a", "memory://there"):
            with pytest.raises(DataError, match=r"no answer within 0.2 s"):
                fetch.fetched(url, tmp_path / "copy")
    ended.set()


def test_what_is_wrong_with_the_address_or_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for url, target, message in (
        ("http://127.0.0.1:9/a", tmp_path / "copy", "ConnectionRefusedError: Connection refused"),
        ("nosuch://x", tmp_path / "copy", "nosuch://x: the file cannot be read: ValueError: Protocol not known"),
        (str(tmp_path / "file"), tmp_path / "file" / "copy", r"the cache cannot be written: .*\n  -> "),
    ):
        with pytest.raises(DataError, match=message):
            fetch.fetched(url, target)
    with pytest.raises(DataError, match="too large"):
        fetch.fetched(str(tmp_path / "file"), tmp_path / "copy", accept=_refuse)


def _refuse(size: int) -> None:
    raise DataError("too large")


def _fetch(url: str, target: str) -> None:
    fetch.fetched(url, Path(target), is_intact)


def test_processes_started_together_copy_once(tmp_path):
    with serving() as (url, requests):
        ranks = [start(_fetch, (url, str(tmp_path / "copy"))) for _ in range(4)]
        assert wait_for(ranks, 60) == [0] * 4
    assert len(requests) == 1
    assert files(tmp_path) == ["copy", "copy.lock"]


def test_a_killed_process_leaves_no_copy(tmp_path):
    """It dies while the server sends nothing; the next one has no wait for it."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        process, receiver = start(_fetch, (f"http://127.0.0.1:{silent.getsockname()[1]}/a", str(tmp_path / "copy")))
        silent.settimeout(60)
        connection, _ = silent.accept()
        os.kill(process.pid, signal.SIGKILL)
        assert wait_for([(process, receiver)], 60) == [-signal.SIGKILL]
        connection.close()
    assert not (tmp_path / "copy").exists()
    with serving() as (url, _):
        assert fetch.fetched(url, tmp_path / "copy", is_intact).read_bytes() == CONTENT
