"""A request to the key-value store ends within its limit, also if the process that holds the store is frozen."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from harness.distributed.store import LimitedStore, StoreTimeout
from tests.end_to_end.processes import wait_until
from tests.ranks import free_port, start

HELD_S = 60  # a request without a limit would take as long


class Fake:
    """A store that has all keys."""

    def check(self, keys):
        return True


def test_a_request_whose_thread_cannot_start_leaves_the_store_usable(monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = LimitedStore(Fake(), limit_s=30.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StoreTimeout):
            store.check(["a"])
    assert not store._busy.locked()
    assert store.check(["a"])


def test_the_wait_for_another_request_counts(monkeypatch):
    limits, clock = [], iter([10.0, 13.0])  # before and after the wait
    monkeypatch.setattr("harness.distributed.store.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr("harness.distributed.store._result", lambda future, limit_s: limits.append(limit_s))
    LimitedStore(Fake(), limit_s=5.0).check(["a"])
    assert limits == [2.0]


def _hold_store(port: int):
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    time.sleep(HELD_S)
    del store


def test_frozen_store():
    port = free_port()
    process, _ = start(_hold_store, (port,))
    try:
        store = LimitedStore(TCPStore("127.0.0.1", port, is_master=False), limit_s=0.5)
        assert store.compare_set("a", "", "1") == "1"
        os.kill(process.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{process.pid}/task")
        if tasks.exists():  # its threads do not stop at the same moment
            wait_until(lambda: all(" T " in (task / "stat").read_text() for task in tasks.iterdir()), 30, "it stops")
        begin = time.monotonic()
        for request in (lambda: store.check(["a"]), lambda: store.compare_set("a", "", "2"), lambda: store.find("a")):
            with pytest.raises(StoreTimeout):
                request()
        assert time.monotonic() - begin < HELD_S
        os.kill(process.pid, signal.SIGCONT)

        def answers():
            try:
                return store.find("a") == "1"
            except StoreTimeout:
                return False

        wait_until(answers, 30, "the store answers again")
        process.kill()
        process.join()
        with pytest.raises(Exception, match=r".") as caught:
            store.check(["a"])
        assert not isinstance(caught.value, StoreTimeout)
    finally:
        process.kill()
        process.join()
