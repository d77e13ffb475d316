"""Commands that a process of a test forks from itself (tests/forked.py) are what new Python processes would be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import fork_commands
from tests.ranks import start, wait_for

REPORT = """
import json, os, signal, sys, threading
json.dump({"argv": sys.argv, "path": sys.path[0], "environ": dict(os.environ), "session": os.getsid(0) == os.getpid(),
           "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd")), "torch": "torch" in sys.modules,
           "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
           "blocked": len(signal.pthread_sigmask(0, [])), "threads": threading.active_count(),
           "main": __name__}, open(sys.argv[1], "w"))
"""


def _run(words: list[str], output: str, fork: bool) -> None:
    if fork:
        fork_commands()
    with open(output, "wb") as file, open(output):  # the second one must not be inherited
        environ = {**os.environ, "RANK": "3"}
        command = [sys.executable, *words]
        process = subprocess.Popen(command, env=environ, stdout=file, stderr=file, start_new_session=True)
        raise SystemExit(process.wait() % 256)


def run(words: list[str], output: Path, fork: bool = True) -> tuple[int, str]:
    """Exit code and output of ``python WORDS``, started by a process that forks it, or not."""
    (code,) = wait_for([start(_run, (words, str(output), fork))], 60)
    return code, output.read_text()


def test_it_is_what_a_new_python_would_be(tmp_path):
    (tmp_path / "script.py").write_text(REPORT)
    reports = []
    for fork in (True, False):
        words = [str(tmp_path / "script.py"), str(tmp_path / "report.json"), "b=c"]
        assert run(words, tmp_path / "out.txt", fork) == (0, "")
        reports.append(json.loads((tmp_path / "report.json").read_text()))
    assert (reports[0].pop("torch"), reports[1].pop("torch")) == (True, False)
    assert reports[0] == reports[1]


@pytest.mark.parametrize(("body", "code", "shown"), [
    ("raise SystemExit(75)", 75, ""),
    ("raise SystemExit('no data')", 1, "no data"),
    ("raise ValueError('broken')", 1, "ValueError: broken"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 247, ""),
    ("import sys; print(sys.argv[1:], __name__)", 0, "['x'] __main__"),
])  # fmt: skip
def test_its_end(tmp_path, body, code, shown):
    (tmp_path / "script.py").write_text(body)
    found, output = run([str(tmp_path / "script.py"), "x"], tmp_path / "out.txt")
    assert found == code
    assert shown in output
