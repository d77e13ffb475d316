"""Commands that start by a fork of a process with their imports (harness/distributed/forked.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.distributed import forked
from harness.distributed.worker_group import Worker, WorkerGroup

REPORT = """
import json, os, signal, sys, threading
json.dump({"argv": sys.argv, "path": sys.path[0], "environ": dict(os.environ), "session": os.getsid(0) == os.getpid(),
           "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd")), "name": open("/proc/self/comm").read().strip(),
           "sigterm": str(signal.getsignal(signal.SIGTERM)), "blocked": len(signal.pthread_sigmask(0, [])),
           "threads": threading.active_count(), "main": __name__}, open(sys.argv[1], "w"))
"""


HERE = dict(os.environ)


@pytest.fixture
def prepared(monkeypatch):
    """This process, as if it had imported torch for its ranks."""
    monkeypatch.setattr(forked, "_HEAVY", ())
    monkeypatch.setattr(forked, "_prepared", None)
    forked.prepare(["json"], HERE)


def run(words: list[str], folder: Path, **environ: str) -> tuple[WorkerGroup, str]:
    """The ended group of one command, and its output."""
    worker = Worker([sys.executable, *words], {**HERE, **environ}, output=folder / "out.txt", name="rank 3")
    group = WorkerGroup({0: worker}, 5.0, stdin=subprocess.DEVNULL)
    group.wait()
    return group, (folder / "out.txt").read_text()


def test_it_is_what_a_new_python_would_be(prepared, tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(REPORT)
    reports = []
    open_file = open(script)  # noqa: SIM115
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        for fork in (True, False):
            if not fork:
                monkeypatch.setattr(forked, "_prepared", None)
            group, _ = run([str(script), str(tmp_path / "report.json"), "b=c"], tmp_path, RANK="3")
            assert isinstance(group.processes[0], forked.Forked) == fork == forked.possible([sys.executable], HERE)
            assert group.exits == {0: 0}
            reports.append(json.loads((tmp_path / "report.json").read_text()))
    finally:
        signal.signal(signal.SIGTERM, before)
        open_file.close()
    assert reports[0].pop("name") == "rank 3"
    assert reports[1].pop("name") != "rank 3"
    assert reports[0] == reports[1]


def test_it_starts_at_once_where_any_number_of_files_may_be_open(prepared, tmp_path, monkeypatch):
    """As in containers with a limit of 10^9, on kernels that cannot close a range of files in one call."""
    close = os.closerange
    monkeypatch.setattr(
        os, "sysconf", lambda name, original=os.sysconf: 10**9 if name == "SC_OPEN_MAX" else original(name)
    )
    monkeypatch.setattr(os, "closerange", lambda low, high: close(low, high) if high - low < 10**6 else os._exit(9))
    (tmp_path / "script.py").write_text("import os; print(sorted(os.listdir('/proc/self/fd')))")
    group, output = run([str(tmp_path / "script.py")], tmp_path)
    assert isinstance(group.processes[0], forked.Forked)
    assert group.exits == {0: 0}, output


@pytest.mark.parametrize(("body", "code", "shown"), [
    ("raise SystemExit(75)", 75, ""),
    ("raise SystemExit('no data')", 1, "no data"),
    ("raise ValueError('broken')", 1, "ValueError: broken"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ("print('done')", 0, "done"),
])  # fmt: skip
def test_its_end(prepared, tmp_path, body, code, shown):
    script = tmp_path / "script.py"
    script.write_text(body)
    group, output = run([str(script)], tmp_path)
    assert isinstance(group.processes[0], forked.Forked)
    assert group.exits == {0: code}
    assert shown in output


def test_a_module_is_run_as_python_m_does(prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_module.py").write_text("import sys; print(sys.argv[1:], __name__, sys.path[0])")
    _, output = run(["-m", "own_module", "x"], tmp_path)
    assert output == f"['x'] __main__ {tmp_path}\n"


def test_it_is_stopped_like_any_other(prepared, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time; print('ready', flush=True); time.sleep(60)")
    group = WorkerGroup({0: Worker([sys.executable, str(script)], HERE, output=tmp_path / "out")}, 5.0)
    deadline = time.monotonic() + 10
    while not (tmp_path / "out").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    group.stop()
    assert group.wait() == {0: -signal.SIGTERM}


def test_where_a_fork_would_differ_python_is_started(prepared, tmp_path, monkeypatch):
    command = [sys.executable, "driver.py"]
    assert forked.possible(command, {**HERE, "RANK": "1", "HARNESS_LAUNCHED_BY": "x"})
    assert not forked.possible(command, {**HERE, "OMP_NUM_THREADS": "7"})  # read when torch was imported
    assert not forked.possible(["python9", "driver.py"], HERE)
    assert not forked.possible([sys.executable, "-c", "pass"], HERE)
    device = tmp_path / "nvidia0"
    device.touch()
    monkeypatch.setattr(forked, "_DRIVERS", (str(device),))
    with open(device):
        assert not forked.possible(command, HERE)
    assert forked.possible(command, HERE)


def test_nothing_is_imported_under_unknown_variables(monkeypatch):
    """This process has imported torch already, perhaps with another number of threads."""
    monkeypatch.setattr(forked, "_prepared", None)
    forked.prepare(["json"], HERE)
    assert not forked.possible([sys.executable, "driver.py"], HERE)


def test_an_import_that_fails_is_left_to_the_command(monkeypatch):
    monkeypatch.setattr(forked, "_HEAVY", ())
    monkeypatch.setattr(forked, "_prepared", None)
    forked.prepare(["no_such_module"], {**HERE, "OMP_NUM_THREADS": "3"})
    assert not forked.possible([sys.executable, "driver.py"], HERE)
    assert os.environ.get("OMP_NUM_THREADS") != "3"
