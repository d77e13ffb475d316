"""Locks: one owner under all names of a folder, free when it dies, and a marker file where flock is missing."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from harness.errors import ConfigError
from harness.runs import locks, run_dir
from harness.runs.locks import Lock, locked
from harness.runs.run_dir import RunFolder
from tests.fixtures import make_config

OWNER = """
import errno, fcntl, os, sys, time
from pathlib import Path
from harness.runs.locks import Lock
def missing(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
if sys.argv[3] == "marker":
    fcntl.flock = missing
lock = Lock(Path(sys.argv[1]), is_folder=sys.argv[2] == "folder")
assert lock.acquire(10)
print("locked", flush=True)
time.sleep(600)
"""


@contextmanager
def owner(path, kind="folder", by="flock"):
    """Another process that holds the lock until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(path), kind, by], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"locked\n"
        yield process
    finally:
        process.kill()
        process.wait(20)


def test_whether_another_process_holds_it_is_told_without_taking_it(tmp_path):
    assert not locks.is_held(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with owner(tmp_path / "run"):
        named = (tmp_path / "run" / locks.FILE).read_text()
        assert locks.is_held(tmp_path / "run")
    assert not locks.is_held(tmp_path / "run")
    assert (tmp_path / "run" / locks.FILE).read_text() == named


def without_flock(monkeypatch, number=errno.ENOSYS):
    def missing(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", missing)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(run_dir, "_LOCK_S", 0.3)


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("by", ["flock", "marker"])
def test_a_killed_owner_leaves_the_lock_free(tmp_path, monkeypatch, kind, by):
    if by == "marker":
        without_flock(monkeypatch)
    lock = Lock(tmp_path / "place", is_folder=kind == "folder")
    with owner(tmp_path / "place", kind, by) as process:
        assert not lock.try_acquire()
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        assert lock.acquire(5)  # a marker is taken over by renaming it, which needs several attempts
    assert not Lock(lock.path, is_folder=kind == "folder").try_acquire()
    lock.release()
    again = Lock(lock.path, is_folder=kind == "folder")
    assert again.try_acquire()
    again.release()


# A run folder has one owner under all its names


@pytest.mark.parametrize("name", ["link", "renamed", "link to the parent"])
def test_a_run_folder_is_locked_under_all_names(tmp_path, name):
    folder, other = tmp_path / "runs" / "a", tmp_path / "other"
    first = RunFolder(folder)
    first.lock()
    if name == "link":
        other.symlink_to(folder)
    elif name == "renamed":
        folder.rename(other)
    elif name == "link to the parent":
        other.symlink_to(folder.parent)
        other = other / "a"
    with pytest.raises(ConfigError) as caught:
        RunFolder(other).lock()
    assert caught.value.where == str(other)
    first.unlock()
    second = RunFolder(other)
    second.lock()
    second.unlock()


def test_a_second_start_says_at_once_for_whom_it_waits(tmp_path, caplog):
    with owner(tmp_path / "a") as process, caplog.at_level("INFO", logger="harness"):
        whom = f"process {process.pid} on {socket.gethostname()}"
        with pytest.raises(ConfigError, match=rf"already training in this run folder \({whom}\)"):
            RunFolder(tmp_path / "a").lock()
    assert [record.getMessage() for record in caplog.records] == [
        f"waiting up to 0.3 s: the run folder {tmp_path / 'a'} is in use by {whom}"
    ]


def test_a_run_folder_stays_locked_without_its_lock_file(tmp_path):
    first = RunFolder(tmp_path / "runs" / "a")
    first.lock()
    for file in [*(tmp_path / "runs").glob(".*lock*"), *(tmp_path / "runs" / "a").glob(".*")]:
        file.unlink()
    with pytest.raises(ConfigError):
        RunFolder(tmp_path / "runs" / "a").lock()
    first.unlock()


def test_two_machines_exclude_each_other_by_the_file(tmp_path, monkeypatch):
    """Network file systems lock folders for one machine only."""
    first, second = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "a")
    monkeypatch.setattr(Lock, "_flock_folder", lambda _: True)
    first.lock()
    with pytest.raises(ConfigError):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


@pytest.mark.parametrize("by", ["flock", "marker"])
def test_the_lock_stays_with_the_name_when_the_earlier_run_is_moved_aside(tmp_path, monkeypatch, by):
    if by == "marker":
        without_flock(monkeypatch)
    path = tmp_path / "runs" / "small"
    RunFolder(path).claim(make_config(tmp_path))
    (path / "metrics.jsonl").write_text("x")
    folder, aside = RunFolder(path), RunFolder(tmp_path / "runs" / "small.1")
    folder.lock()
    assert "small.1" in folder.claim(make_config(tmp_path, seed=3))
    with pytest.raises(ConfigError):
        RunFolder(path).lock()
    aside.lock()
    aside.unlock()
    folder.unlock()
    RunFolder(path).lock()


def test_a_lock_notices_that_its_file_was_replaced(tmp_path):
    lock = Lock(tmp_path / "lock")
    assert not lock.is_current()
    assert lock.try_acquire()
    assert lock.is_current()
    lock.path.unlink()
    assert not lock.is_current()
    other = Lock(tmp_path / "lock")
    assert other.try_acquire()
    assert other.is_current()
    assert not lock.is_current()


def test_a_file_that_is_replaced_before_it_is_locked_is_not_the_lock(tmp_path, monkeypatch):
    """Its earlier owner removes it, and another takes a new file of this name."""
    real = fcntl.flock

    def late(descriptor, flags):
        lock.path.unlink()
        lock.path.touch()
        real(descriptor, flags)

    lock = Lock(tmp_path / "lock")
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", late)
        assert not lock.try_acquire()
    assert lock.try_acquire()
    assert lock.is_current()
    lock.release()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_start_that_cannot_lock_does_not_continue(tmp_path, monkeypatch, number):
    folder = RunFolder(tmp_path / "a")
    with monkeypatch.context() as patch:
        without_flock(patch, number)
        with pytest.raises(ConfigError, match=f"cannot write to the run folder: {os.strerror(number)}"):
            folder.lock()
    folder.lock()
    folder.unlock()


# File systems without flock


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_flock_a_marker_file_takes_its_place(tmp_path, monkeypatch, caplog, number):
    without_flock(monkeypatch, number)
    monkeypatch.setattr(locks, "_reported", set())
    started = time.monotonic()
    first, second = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "a")
    first.lock()
    assert time.monotonic() - started < 10  # it waits for nobody
    with pytest.raises(ConfigError) as caught:
        second.lock()
    assert f"process {os.getpid()} on {socket.gethostname()}" in str(caught.value)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    first.unlock()
    second.lock()
    second.unlock()


def test_the_marker_of_another_process_is_not_this_lock(tmp_path, monkeypatch):
    """It makes and marks a new folder just after this process has moved its own aside."""
    without_flock(monkeypatch)
    folder = RunFolder(tmp_path / "a")
    folder.lock()
    assert folder._lock.is_current()
    os.rename(tmp_path / "a", tmp_path / "a.1")
    with owner(tmp_path / "a", by="marker"):
        assert not folder._lock.is_current()
        folder.unlock()
        with pytest.raises(ConfigError, match="another process is already training"):
            folder.lock()


def test_a_marker_of_another_machine_is_named_and_never_taken_over(tmp_path, monkeypatch):
    """It cannot be known whether its owner still runs."""
    without_flock(monkeypatch)
    folder = RunFolder(tmp_path / "a")
    folder.lock()
    marker = tmp_path / "a" / ".lock.held"
    content = marker.read_text().splitlines()
    folder.unlock()
    marker.write_text("\n".join(["999999", "elsewhere", *content[2:], ""]))
    with pytest.raises(ConfigError) as caught:
        folder.lock()
    assert "process 999999 on elsewhere" in str(caught.value)
    assert str(marker) in str(caught.value)
    marker.unlink()
    folder.lock()
    folder.unlock()


def test_the_wait_for_a_file_ends(tmp_path):
    with locked(tmp_path / "lock", 0.0), pytest.raises(TimeoutError), locked(tmp_path / "lock", 0.2):
        pass
    with locked(tmp_path / "lock", 0.0):
        pass
