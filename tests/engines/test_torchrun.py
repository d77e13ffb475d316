"""Engine torchrun on one machine: commands, the same weights, restarts, exit codes, no process left.

Several machines: test_nodes_elastic.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from harness.distributed.launch_env import Launch
from harness.distributed.monitor import EngineReport
from harness.distributed.rank_exit import RankExit
from harness.engines import launch
from harness.engines.torchrun import engine as torchrun
from harness.engines.torchrun import rendezvous
from harness.errors import ConfigError, LaunchError
from harness.runs import exit_files
from harness.runs.outcome import ExitCollector
from tests.end_to_end.experiment import assert_same_run, record, run, write_config
from tests.end_to_end.processes import END_S, started, wait_for_steps, wait_until

MODELS = "tests.end_to_end.models"
GOLDEN = Path(__file__).parent / "golden"
START_S = 90  # three imports of torch, one after the other


def command(config, *words, engine="torchrun"):
    return [sys.executable, "-m", "harness", "launch", "-c", config, "--engine", engine, "--nproc", "2", *words]


def folder_of(config):
    return config.parent / "runs" / "run"


def slow(folder, data):
    """A slow experiment, and the file that makes it fast once it exists."""
    go = folder / "go"
    model = {"name": f"{MODELS}.Slow", "args": {"step_s": 0.2, "until": str(go)}}
    train, runtime = {"epochs": 6, "log_every": 1}, {"device": "cpu", "timeout_s": 100}  # nothing ends by this limit
    checkpoint = {"every": 2}
    return write_config(folder, data, model=model, train=train, runtime=runtime, checkpoint=checkpoint), go


def wait_for_more_steps(folder, count):
    wait_for_steps(folder, len([line for line in record(folder) if line["split"] == "train"]) + count)


def num_starts(folder):
    with suppress(OSError, ValueError):
        return len(json.loads((folder / "provenance.json").read_text()))
    return 0


# Commands

SHAPES = {
    "one": ["launch.nproc=2", "launch.max_restarts=3", "launch.env={NCCL_DEBUG: INFO}"],
    "several": ["launch.nnodes=2", "launch.nproc=4", "launch.torchrun.rendezvous=n0:29400", "launch.grace_s=20"],
    "numbered": ["launch.nnodes=2", "launch.torchrun={node_rank: 1, rendezvous: n0:29500}", "launch.interface=eth0"],
    "elastic": ["launch.nnodes=4", "launch.max_restarts=3", "batch.global=12",
                "launch.torchrun={min_nodes: 1, rendezvous: n0:29400, join_s: 99.5}"],
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_render(tmp_path, stripes, monkeypatch, shape):
    monkeypatch.setattr(rendezvous, "interface_towards", lambda *_, **__: "eth0")
    monkeypatch.setattr(rendezvous, "require_address", lambda _: "10.0.0.2")
    monkeypatch.setattr(rendezvous, "is_here", lambda _: False)
    config = str(write_config(tmp_path, stripes))
    text = torchrun.render(launch.plan(config, ["launch.engine=torchrun", *SHAPES[shape]]))
    text = text.replace(config, "CONFIG").replace(shlex.quote(sys.executable), "PYTHON")
    assert text == (GOLDEN / f"torchrun_{shape}.txt").read_text()


REFUSED = {
    "no place to meet": (["nnodes=2"], "rendezvous=HOST:PORT"),
    "a place for one": (["torchrun.rendezvous=a:1"], "launch.torchrun.rendezvous needs several machines"),
    "a number for one": (["torchrun.node_rank=0"], "launch.torchrun.node_rank needs several machines"),
    "a number too high": (["nnodes=2", "torchrun.rendezvous=a:1", "torchrun.node_rank=2"], "use a number from 0 to 1"),
    "numbers and restarts": (
        ["nnodes=2", "torchrun.rendezvous=a:1", "torchrun.node_rank=0", "max_restarts=1"],
        "cannot be combined",
    ),
    "a range without restarts": (
        ["nnodes=2", "torchrun.min_nodes=1", "torchrun.rendezvous=a:1"],
        "add --max-restarts 3, or use --nnodes N",
    ),
    "a range upside down": (
        ["nnodes=2", "torchrun.min_nodes=3", "torchrun.rendezvous=a:1"],
        "is more than launch.nnodes=2",
    ),
    "a batch for some": (
        ["nnodes=4", "max_restarts=1", "torchrun={min_nodes: 3, rendezvous: a:1}"],
        "use a multiple of 12, or",
    ),
    "an unknown host": (
        ["nnodes=2", "torchrun.rendezvous=no.such.host.invalid:1"],
        "has no route to no.such.host.invalid",
    ),
    "no such interface": (
        ["nnodes=2", "torchrun.rendezvous=10.1.2.3:1", "interface=eth77"],
        "no network interface eth77",
    ),
    "loopback": (["nnodes=2", "torchrun.rendezvous=10.1.2.3:1", "interface=lo"], "cannot reach other machines"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_work_are_refused(tmp_path, stripes, case):
    words, message = REFUSED[case]
    config, words = str(write_config(tmp_path, stripes)), [f"launch.{word}" for word in words]
    for call in (torchrun.render, torchrun.start):
        with pytest.raises(LaunchError) as caught:
            call(launch.plan(config, ["launch.engine=torchrun", *words]))
        assert message in str(caught.value)


def test_an_ipv6_rendezvous_is_refused(tmp_path, stripes):
    with pytest.raises(ConfigError, match="write HOST:PORT, such as node1:29400, with a name or an IPv4 address"):
        launch.plan(
            str(write_config(tmp_path, stripes)),
            ["launch.engine=torchrun", "launch.nnodes=2", "launch.torchrun.rendezvous='[fd00::1]:29400'"],
        )


def exit_of(rank, code):
    return RankExit(rank, RankExit.from_code(rank, code).cause, code, "n0", 7, message="line")


def test_error_files_of_the_newest_attempt_are_read(tmp_path):
    assert torchrun.newest_attempt(tmp_path) == (0, [], None)
    for attempt, codes in ((0, [70, 70]), (9, [0, 75]), (10, [65])):
        for rank, code in enumerate(codes):
            folder = tmp_path / "run_x" / f"attempt_{attempt}" / str(rank)
            folder.mkdir(parents=True)
            launch_ = Launch(rank + 4, world_size=8, error_file=str(folder / "error.json"))
            exit_files.write_for_torch(launch_, exit_of(rank + 4, code))
    assert torchrun.newest_attempt(tmp_path) == (10, [exit_of(4, 65)], 8)


# A launcher that stays when its ranks are gone

STAYS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = pathlib.Path(sys.argv[1], "run_x", "attempt_0", "0")
folder.mkdir(parents=True)
(folder / "error.json").write_text(sys.argv[2])
time.sleep(1000)
"""
GONE = "it left no record: it was killed, or its machine was lost"
RANGE = ["nnodes=2", "torchrun.min_nodes=1", "max_restarts=1", "torchrun.rendezvous=127.0.0.1:1"]


@pytest.mark.parametrize(
    ("exit_code", "words", "is_ended", "lost"),
    [(0, [], True, ""), (2, [], True, ""), (75, [], True, GONE), (70, [], True, GONE),
     (70, ["max_restarts=1"], False, GONE), (75, RANGE, False, "")],
)  # fmt: skip
def test_launcher_without_ranks_is_ended_unless_it_may_restart_them(
    tmp_path, stripes, monkeypatch, exit_code, words, is_ended, lost
):
    """Rank 1 is on another machine, and left a record in an earlier start."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    content = exit_files.to_torch_error_file(exit_of(0, exit_code), 2)
    monkeypatch.setattr(torchrun, "_command", lambda _, __, folder: [sys.executable, "-c", STAYS, folder, content])
    monkeypatch.setattr(torchrun, "WAIT_S", dict.fromkeys(torchrun.WAIT_S, 0.2))
    monkeypatch.setattr(torchrun, "KILL_S", 0.2)
    monkeypatch.setattr(torchrun, "_CHECK_S", 0.05)
    words = ["launch.engine=torchrun", *(f"launch.{word}" for word in words)]
    job = launch.plan(str(write_config(tmp_path, stripes)), words)
    (job.folder / "logs").mkdir(parents=True)
    exit_files.write(job.folder / "logs", exit_of(1, 70))
    started_ = torchrun.start(job)
    wait_until(lambda: list(tmp_path.glob("harness-torchrun-*/*/*/0/error.json")), START_S, "the launcher")
    if not is_ended:
        threading.Timer(1.0, lambda: (started_.stop(), started_.stop())).start()
    report = started_.follow()
    exits = [exit_of(0, exit_code), *([RankExit.lost(lost)] if lost else [])]
    assert report == EngineReport(exits, not is_ended, 2)
    assert not list(tmp_path.glob("harness-torchrun-*"))


ENDS_EARLY = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
pathlib.Path(sys.argv[1], "run_x", "attempt_0", "0").mkdir(parents=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("stops", "exit_code"), [(1, 143), (2, 143)])
def test_stop_before_the_ranks_can_leave_a_record(tmp_path, stripes, monkeypatch, stops, exit_code):
    """A first signal before the ranks train loses nothing, so the same command may resume, as with engine local."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torchrun, "_command", lambda _, __, folder: [sys.executable, "-c", ENDS_EARLY, folder])
    job = launch.plan(str(write_config(tmp_path, stripes)), ["launch.engine=torchrun"])
    collector = ExitCollector(job.folder)
    started_ = torchrun.start(job)
    wait_until(lambda: list(tmp_path.glob("harness-torchrun-*/*/*/0")), START_S, "the launcher")
    for _ in range(stops):
        started_.stop()
    outcome = collector.conclude(started_.follow())
    assert outcome.exit_code == exit_code, outcome.text


# Whole runs


@pytest.mark.slow
def test_killed_rank_launcher_and_harness_then_exact_end(tmp_path, stripes):
    """With a restart the ranks meet again; without one there is a report. No process is left, and the run ends with the
    weights of the unbroken run."""
    config, go = slow(tmp_path / "torchrun", stripes)
    folder = folder_of(config)

    def until_it_trains(count):
        wait_until(lambda: num_starts(folder) == count, START_S, f"start {count}")
        wait_for_more_steps(folder, 2)

    def reasons():
        return [exit.message for exit in exit_files.read(folder / "logs").values()]

    with started(command(config, "--max-restarts", "1"), tmp_path / "rank.txt", fork=True) as run_:
        until_it_trains(1)
        run_.signal(signal.SIGKILL, run_.ranks()[1])
        until_it_trains(2)
        run_.signal(signal.SIGKILL, run_.ranks()[0])
        assert run_.wait(END_S) == 70
        assert not run_.alive()
    report = run_.text().partition("failed: rank 0 at step")[2]
    assert "Lost: it left no record: it was killed, or its machine was lost" in report
    assert "rank 1: lost contact on " in report

    with started(command(config), tmp_path / "launcher.txt", fork=True) as run_:
        until_it_trains(3)
        run_.signal(signal.SIGKILL, _launcher(run_))
        assert run_.wait(END_S) == 75
        assert not run_.alive()
    # At least one rank has noticed, by its parent or the launcher's store; the other may have learned it from that one.
    assert any("launcher" in reason for reason in reasons())
    assert run_.text().splitlines()[-1].startswith("stopped early with a checkpoint: ")

    go.write_text("")
    assert run(config, 2) == [0, 0]
    assert run(config, 2, "name=unbroken") == [0, 0]
    assert_same_run(folder.with_name("unbroken"), folder)

    go.unlink()
    folder = folder.with_name("alone")
    with started(command(config, "--nproc", "1", "name=alone"), tmp_path / "harness.txt", fork=True) as run_:
        until_it_trains(1)
        run_.signal(signal.SIGKILL)
        run_.process.wait()
        wait_until(lambda: not run_.alive(), END_S, "launcher and rank end")
    assert reasons() == ["SIGTERM"]


def _launcher(run_):
    """The process id of torch's launcher: the ranks' parent."""
    (parent,) = {int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]) for rank in run_.ranks()}
    return parent


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "torchrun"])
def test_ranks_before_rendezvous_end_with_their_launcher(tmp_path, stripes, engine):
    """Their parent is killed while rank 0 looks for rank 1, and rank 1 does not look yet."""
    config, _ = slow(tmp_path, stripes)
    (tmp_path / "sitecustomize.py").write_text(HELD_UP)
    with started(command(config, engine=engine), tmp_path / "terminal.txt", PYTHONPATH=str(tmp_path)) as run_:
        wait_until(lambda: (tmp_path / "waiting").exists(), START_S, "rank 0 looks for rank 1")
        (above,) = {run_.process.pid} if engine == "local" else {_launcher(run_)}
        if engine == "torchrun":
            run_.signal(signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(above, signal.SIGKILL)
        run_.process.wait()
        (tmp_path / "go").write_text("")  # rank 1 wakes up and finds nobody
        wait_until(lambda: not run_.alive(), END_S, "the ranks end")
    assert not (tmp_path / "runs").exists()


# Runs at the start of a rank: rank 0 marks that it looks for its peer, and rank 1 is late.
HELD_UP = """
import os, sys, threading, time
if "RANK" in os.environ or "launch" in sys.orig_argv:
    folder = os.path.dirname(os.path.abspath(__file__))
    def look():
        while not hasattr(sys.modules.get("harness.distributed.process_group"), "meet"):
            time.sleep(0.05)
        process_group = sys.modules["harness.distributed.process_group"]
        meet = process_group.meet
        def late(launch, *others):
            if launch.rank == 1:
                while not os.path.exists(folder + "/go"):
                    time.sleep(0.05)
            open(folder + "/waiting", "w").close()
            return meet(launch, *others)
        process_group.meet = late
    def start():
        threading.Thread(target=look, daemon=True).start()
    if "RANK" in os.environ:
        start()
    os.register_at_fork(after_in_child=start)  # the local engine forks its ranks
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it asks for a CUDA device where there is none")
def test_exit_code_of_an_error_before_rendezvous(tmp_path, stripes):
    config = write_config(tmp_path, stripes)
    with started(command(config, "runtime.device=cuda"), tmp_path / "terminal.txt") as run_:
        assert run_.wait(START_S) == 2
        assert not run_.alive()
    assert run_.text().count("error: torch can use no CUDA device: ") == 1
    assert "ended with exit code 2 before the run began" in run_.text()
