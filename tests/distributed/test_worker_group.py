"""Supervision of local processes: order of exits, end of the peers, stop and kill, nothing left behind."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.distributed import processes, worker_group
from harness.distributed.rank_exit import Cause
from harness.distributed.worker_group import LocalRun, Worker, WorkerGroup
from tests.conftest import ROOT
from tests.end_to_end.processes import wait_until


def shell(text: str, output: Path | None = None) -> Worker:
    return Worker(["bash", "-c", text], os.environ, output=output)


def test_first_to_end_comes_first_and_peers_are_ended(monkeypatch):
    monkeypatch.setattr(worker_group, "PEERS_S", 0.2)
    group = WorkerGroup({0: shell("exec sleep 60"), 1: shell("kill -KILL $$")}, 60)
    report = group.follow()
    assert [(exit.rank, exit.exit_code) for exit in report.exits] == [(1, -signal.SIGKILL), (0, -signal.SIGTERM)]
    assert [exit.cause for exit in report.exits] == [Cause.SIGNAL, Cause.PEER_LOST]
    assert "killed by its launcher" in report.exits[1].message


@pytest.mark.parametrize(("stops", "grace_s"), [(1, 0.2), (2, 60.0)])
def test_process_that_ignores_the_stop_is_killed(tmp_path, stops, grace_s):
    """After the grace period, or by the second stop."""
    group = WorkerGroup({0: shell("trap '' TERM; echo ready; sleep 60", tmp_path / "out")}, grace_s)
    wait_until(lambda: (tmp_path / "out").read_text(), 30, "the handler")
    begin = time.monotonic()
    for _ in range(stops):
        group.stop()
    assert group.wait() == {0: -signal.SIGKILL}
    assert time.monotonic() - begin < 60  # the grace period of the second case, and the length of the command
    assert group.num_stops == stops


def test_children_of_a_killed_process_are_killed(tmp_path):
    group = WorkerGroup({0: shell("sleep 60 & echo $!; kill -KILL $$", tmp_path / "out")}, 60)
    assert group.wait() == {0: -signal.SIGKILL}
    child = Path("/proc") / (tmp_path / "out").read_text().strip()
    wait_until(lambda: not (child / "cmdline").exists() or not (child / "cmdline").read_text(), 30, "the child's end")


def test_failed_start_leaves_nothing_running(monkeypatch):
    children, start = [], subprocess.Popen

    def started(*arguments, **options):
        children.append(start(*arguments, **options))
        return children[-1]

    monkeypatch.setattr(worker_group.subprocess, "Popen", started)
    with pytest.raises(FileNotFoundError):
        WorkerGroup({0: shell("exec sleep 60"), 1: Worker(["/no/such/file"], {})}, 60)
    assert [process.poll() for process in children] == [-signal.SIGKILL]


def test_error_while_waiting_leaves_nothing_running(tmp_path):
    group = WorkerGroup({0: shell("sleep 60 & echo $!; wait", tmp_path / "out")}, 60)
    wait_until(lambda: (tmp_path / "out").read_text(), 30, "the child's number")
    child = Path("/proc") / (tmp_path / "out").read_text().strip()
    with pytest.raises(ZeroDivisionError):
        group.wait(lambda: 1 / 0)
    assert group.popens[0].poll() == -signal.SIGKILL
    wait_until(lambda: not (child / "cmdline").exists() or not (child / "cmdline").read_text(), 30, "the child's end")


def test_error_of_the_store_leaves_no_rank_running(monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(worker_group.subprocess, "Popen", lambda *a, **o: started.append(popen(*a, **o)) or started[-1])
    monkeypatch.setattr(worker_group, "_store", lambda listening: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LocalRun(["sleep", "60"], 2, dict(os.environ), 1.0, "a test")
    assert [process.poll() for process in started] == [-signal.SIGKILL] * 2


PARENT = """
import subprocess, sys, time
from harness.distributed.worker_group import LocalRun, Worker, WorkerGroup
from harness.errors import LaunchError
group = WorkerGroup({0: Worker(["sleep", "60"], {})}, 60, ends_with_parent=True)
print(group.popens[0].pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="death signals are Linux's")
def test_process_ends_with_its_killed_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until(lambda: not Path(f"/proc/{child}").exists(), 30, "the child's end")


def test_kill_after_does_not_wait_for_a_process_that_is_blocked_in_the_kernel(monkeypatch):
    looks = itertools.count()

    def alive():
        assert next(looks) < 1000, "it still waits"
        return [7]

    monkeypatch.setattr(processes, "_KILLED_S", 0.3)
    monkeypatch.setattr(processes, "_POLL_S", 0.01)
    monkeypatch.setattr(processes, "send", lambda number, pids: None)
    processes.kill_after(0.0, alive)  # it returns


def test_kill_after_kills_when_its_time_has_long_passed():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        processes.kill_after(-60.0, lambda: [process.pid] if process.poll() is None else [])
        assert process.poll() == -signal.SIGKILL
    finally:
        process.kill()


def test_kill_after_leaves_time_and_then_kills():
    process = subprocess.Popen(["sleep", "60"])
    begin = time.monotonic()
    processes.kill_after(0.2, lambda: [process.pid] if process.poll() is None else [])
    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - begin >= 0.2
