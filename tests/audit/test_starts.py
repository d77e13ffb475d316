from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.audit import process_family, records, starts
from harness.audit.folders import Session
from harness.audit.plan import AuditPlan, PlannedKill
from harness.audit.process_family import FamilyMember, ProcessFamily
from harness.audit.starts import CommandStarts
from harness.errors import ConfigError
from tests.audit import fake_training

# Starts processes in sessions of their own, with --out one without the environment of the start, and trains.
WITH_CHILDREN = """
import fake_training, pathlib, subprocess, sys, os
wait = [sys.executable, "-c", "import time; time.sleep(60)"]
own = subprocess.Popen(wait, start_new_session=True)
bare = subprocess.Popen(wait, start_new_session=True, env={} if "--out" in sys.argv else None)
start = f"import subprocess; print(subprocess.Popen({wait}, start_new_session=True, stdout=-3, stderr=-3).pid)"
orphan = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True)
pathlib.Path("pids").write_text(f"{own.pid} {bare.pid} {orphan.stdout} {os.getpid()}")
sys.argv = ["fake_training.py", *sys.argv[1:]]
fake_training.main()
"""
ON_TERM = """
import fake_training, pathlib, signal, sys
def handle(*_):
    pathlib.Path("terminated").touch()
    sys.exit(7)
signal.signal(signal.SIGTERM, handle if sys.argv[1] == "obeys" else signal.SIG_IGN)
del sys.argv[1]
fake_training.main()
fake_training.until(lambda: False)
"""


@pytest.fixture
def session(tmp_path: Path) -> Session:
    source = tmp_path / "project"
    source.mkdir()
    shutil.copy(fake_training.__file__, source)
    (source / "children.py").write_text(WITH_CHILDREN)
    (source / "term.py").write_text(ON_TERM)
    (tmp_path / "data").mkdir()
    (tmp_path / "session").mkdir()
    made = Session(source, tmp_path / "session")
    made.fresh()
    return made


def commands(session: Session, *words: str, resume: str = "", timeout_s: float = 60, grace_s: float = 60.0):
    return CommandStarts(session, [sys.executable, *words], resume, dict(os.environ), timeout_s, grace_s)


def plan(session: Session, name: str, kill: PlannedKill | None = None, how="KILL") -> AuditPlan:
    return AuditPlan(str(session.records(name)), kill, signal=how)


def is_running(pid: int) -> bool:
    with_state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return with_state.stdout.strip()[:1] not in ("", "Z")


def test_a_start_that_ends(session):
    done = commands(session, "fake_training.py", "--out", "{out}").start("undisturbed", plan(session, "undisturbed"))
    assert (done.code, done.killed, done.late) == (0, None, "")
    assert json.loads((session.records("undisturbed") / "ended.json").read_text()) == {**vars(done)}
    assert (session.kept("undisturbed") / "out" / "step-12.pt").exists()
    assert not session.out.exists()


def test_a_failure_keeps_its_output(session):
    done = commands(session, "fake_training.py", "--fault", "fail").start("undisturbed", plan(session, "undisturbed"))
    assert done.code == 1
    assert records.read(session.records("undisturbed")).last_lines(1) == ["there is no data"]


def test_a_command_that_cannot_be_started(session):
    made = CommandStarts(session, ["no-such-program"], "", {}, 60)
    with pytest.raises(ConfigError, match="no-such-program"):
        made.start("undisturbed", plan(session, "undisturbed"))


def test_words(session):
    source, data = session.copy.source, session.copy.source.parent / "data"
    made = commands(
        session, "../data", "../missing", f"--out={source}/out", "--data=../data", "{out}/x", f"{source}x",
        resume="--from '{latest}' --now",
    )  # fmt: skip
    first = [str(data), "../missing", f"--out={session.work}/out", f"--data={data}", f"{session.out}/x", f"{source}x"]
    assert made.words()[1:] == first
    assert made.words(Path("/c p"), resumed=True)[1:] == [*first, "--from", "/c p", "--now"]
    within = commands(session, "a", "{resume}", "b", resume="--from {latest}")
    assert within.words()[1:] == ["a", "b"]
    assert within.words(Path("/c"), resumed=True)[1:] == ["a", "--from", "/c", "b"]
    assert commands(session, "-c", "x {resume}; y", resume="--now").words(resumed=True)[2] == "x --now; y"


def test_environment(session, tmp_path):
    environ = {"PYTHONPATH": f"lib:../data:{tmp_path}/other::", "PYTHONHASHSEED": "3"}
    made = CommandStarts(session, ["x"], "", environ, 60).environ(Path("/plan"))
    path = [str(starts.HOOK), f"{session.work}/lib", f"{tmp_path}/data", f"{tmp_path}/other"]
    assert made == {
        "PYTHONPATH": ":".join(path), "PYTHONHASHSEED": "3", "PWD": str(session.work), "RESUME_AUDIT": "/plan"
    }  # fmt: skip


def test_all_processes_die_with_the_launcher(session):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        made = commands(session, "children.py", "--out", "{out}")
        done = made.start("killed", plan(session, "killed", PlannedKill("step", 5)))
        assert done.code is None
        assert done.killed["step"] == 4
        pids = list(map(int, (session.kept("killed") / "work" / "pids").read_text().split()))
        assert len(pids) == 4
        assert [is_running(pid) for pid in pids] == [False] * 4
        assert is_running(other.pid)
    finally:
        other.kill()
        other.wait()
    assert sorted(path.name for path in (session.kept("killed") / "out").iterdir()) == ["step-3.pt"]


def test_processes_that_are_left_over_are_ended(session, monkeypatch):
    monkeypatch.setattr(starts, "_STRAYS_S", 0.1)
    done = commands(session, "children.py").start("undisturbed", plan(session, "undisturbed"))
    assert (done.code, done.late) == (0, "")
    pids = map(int, (session.kept("undisturbed") / "work" / "pids").read_text().split())
    assert [is_running(pid) for pid in pids] == [False] * 4


def test_a_torn_file_stays_torn(session):
    made = commands(session, "fake_training.py", "--out", "{out}")
    done = made.start("killed", plan(session, "killed", PlannedKill("write", 2)))
    assert done.killed["place"] == "write"
    complete = (session.kept("killed") / "out" / "step-3.pt").stat().st_size
    assert (session.kept("killed") / "out" / "step-6.pt").stat().st_size < complete


@pytest.mark.parametrize(("how", "code"), [("obeys", 7), ("ignores", None)])
def test_term(session, how, code):
    made = commands(session, "term.py", how, grace_s=60.0 if code else 0.5)
    done = made.start("killed", plan(session, "killed", PlannedKill("step", 5), "TERM"))
    assert (done.code, done.killed["number"]) == (code, 5)
    assert (session.kept("killed") / "work" / "terminated").exists() == (how == "obeys")


def test_a_start_that_hangs_is_ended(session):
    made = commands(session, "fake_training.py", "--fault", "hang", timeout_s=1.0)
    done = made.start("undisturbed", plan(session, "undisturbed"))
    assert (done.code, done.late) == (None, "it made no progress for 1 s")


def test_a_start_that_goes_on_for_ever_is_ended(session):
    made = commands(session, "fake_training.py", "--steps", "1000000000", "--save-every", "1000000000")
    made.limit_s = 1.0
    done = made.start("resumed", plan(session, "resumed"))
    assert done.late == "it had not ended after 1 s"


def test_an_interrupt_leaves_nothing_running(session, monkeypatch):
    def interrupt(_: float) -> None:
        monkeypatch.undo()
        started = session.work / "pids"
        fake_training.until(lambda: started.exists() and len(started.read_text().split()) == 4)
        raise KeyboardInterrupt

    monkeypatch.setattr(starts.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        commands(session, "children.py", "--fault", "hang").start("undisturbed", plan(session, "undisturbed"))
    pids = map(int, (session.work / "pids").read_text().split())
    assert [is_running(pid) for pid in pids] == [False] * 4


def test_a_process_with_a_number_used_again_is_spared():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        process_family._send(signal.SIGKILL, FamilyMember(child.pid, "0"))
        assert child.poll() is None
        assert ProcessFamily(child.pid, "/no/plan").kill() == set()
        assert child.wait(10) == -signal.SIGKILL
