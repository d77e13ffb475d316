"""Leases: who owns a job, and when another process takes it over. tests/data/table/test_table_cache.py has more."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from harness.runs import lease, url_store
from harness.runs.lease import Lease
from harness.runs.storage import LocalStore
from harness.runs.url_store import UrlStore

FORK = multiprocessing.get_context("fork")


@pytest.fixture(params=["folder", "URL"])
def store(request, tmp_path, monkeypatch):
    monkeypatch.setattr(url_store, "_SETTLED_S", 0.05)
    return LocalStore(tmp_path) if request.param == "folder" else UrlStore(f"file://{tmp_path}")


def _own(store, held) -> None:
    if Lease(store, "job").acquire():
        held.set()
    time.sleep(100)


def test_running_owner_of_this_machine_may_be_silent(store, monkeypatch):
    monkeypatch.setattr(lease, "SILENT_S", 0.2)
    monkeypatch.setattr(lease, "RENEWED_S", 1000.0)
    held = FORK.Event()
    owner = FORK.Process(target=_own, args=(store, held))
    owner.start()
    try:
        assert held.wait(20)
        mine = Lease(store, "job")
        for _ in range(3):
            assert not mine.acquire()
            time.sleep(0.2)
        os.kill(owner.pid, signal.SIGSTOP)
        end = time.monotonic() + 10
        while not mine.acquire(alone=False):
            assert time.monotonic() < end
            time.sleep(0.02)
        mine.release()
    finally:
        owner.kill()
        owner.join(10)


def test_dead_owner_is_replaced_at_once_and_only_with_the_lock(store):
    held = FORK.Event()
    owner = FORK.Process(target=_own, args=(store, held))
    owner.start()
    assert held.wait(20)
    mine = Lease(store, "job")
    assert not mine.acquire()
    owner.kill()
    owner.join(10)
    assert not mine.acquire(alone=False)
    assert mine.acquire()
    assert mine.is_held()
    mine.release()
    assert store.files() == {}


def test_lease_is_renewed_and_may_be_lost(store, monkeypatch):
    monkeypatch.setattr(lease, "RENEWED_S", 0.05)
    mine = Lease(store, "job")
    assert mine.acquire()
    before, end = store.read("job"), time.monotonic() + 10
    while store.read("job") == before:
        assert time.monotonic() < end
        time.sleep(0.02)
    while mine.is_held():  # it may be renewed at the same moment
        assert time.monotonic() < end
        store.write("job", "another process")
        time.sleep(0.1)
    mine.release()
    assert store.read("job") == "another process"


def test_of_many_that_start_together_one_gets_it(store, monkeypatch):
    monkeypatch.setattr(url_store, "_SETTLED_S", 1.0)

    def ask() -> None:
        barrier.wait()
        mine = Lease(store, "job")
        results.put((mine.acquire(), time.sleep(0.5))[0])

    barrier, results = FORK.Barrier(6), FORK.Queue()
    processes = [FORK.Process(target=ask) for _ in range(6)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=30) for _ in processes) == [False] * 5 + [True]
    for process in processes:
        process.join(10)
