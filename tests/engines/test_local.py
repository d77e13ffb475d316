"""Engine local: the same weights, one report, exit codes, no process left."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys

import pytest

from harness.distributed import devices
from harness.distributed.monitor import EngineReport
from harness.distributed.rank_exit import Cause, RankExit
from harness.engines import base, launch
from harness.engines.local import engine as local
from harness.errors import ConfigError, LaunchError
from harness.tools.compare.exactness import differences
from tests.conftest import ROOT
from tests.end_to_end.experiment import assert_same_run, run, write_config
from tests.end_to_end.processes import END_S, started, wait_for_steps, wait_until

MODELS = "tests.end_to_end.models"
SLOW = {"name": f"{MODELS}.Slow", "args": {"step_s": 0.1}}


def command(config, *words):
    return [sys.executable, "-m", "harness", "launch", "-c", config, "--nproc", "2", *words]


def test_render(tmp_path, stripes):
    config = str(write_config(tmp_path, stripes))
    environ = "OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo A='b c'"
    words = ["launch.interface=lo", "launch.env={A: b c}"]
    text = local.render(launch.plan(config, words))
    assert text.startswith(f"{environ} RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 ")
    command = shlex.join([sys.executable, "driver.py", "-c", config, *words])
    assert text.endswith(f" {command}\n")
    assert command.endswith(" launch.interface=lo 'launch.env={A: b c}'")
    note, line = local.render(launch.plan(config, [*words, "launch.nproc=4"])).splitlines()
    assert "RANK and LOCAL_RANK from 0 to 3" in note
    assert "RANK=0 LOCAL_RANK=0 WORLD_SIZE=4" in line


def test_missing_interface_is_reported(tmp_path, stripes):
    job = launch.plan(str(write_config(tmp_path, stripes)), ["launch.interface=eth9"])
    with pytest.raises(LaunchError, match=r"no network interface eth9(.|\n)*lo \(127.0.0.1\)"):
        local.start(job)


def test_batch_that_cannot_be_divided_is_refused(tmp_path, stripes, monkeypatch):
    monkeypatch.setattr("harness.engines.base.usable_cores", lambda: 2)
    told = r"8 rows cannot be divided evenly among 100 ranks \(this machine has 2 cores\)"
    with pytest.raises(ConfigError, match=told):
        launch.plan(str(write_config(tmp_path, stripes)), ["launch.nproc=100"])


def test_dry_run_does_nothing(tmp_path, stripes, capsys):
    config = write_config(tmp_path, stripes)
    assert launch.main(str(config), ["launch.nproc=2"], dry_run=True) == 0
    assert "driver.py" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_killed_rank_is_reported_and_the_restart_is_exact(tmp_path, stripes):
    """After SIGKILL of rank 1 there is one report; the same command then gives the weights of an unbroken run."""
    whole = write_config(tmp_path / "whole", stripes, model=SLOW)
    assert run(whole, 2) == [0, 0]
    config = write_config(tmp_path / "killed", stripes, model=SLOW)
    folder = tmp_path / "killed" / "runs" / "run"
    with started(command(config), tmp_path / "terminal.txt", fork=True) as run_:
        wait_for_steps(folder, 4)
        run_.signal(signal.SIGKILL, run_.ranks()[1])
        assert run_.wait(END_S) == 70
        assert not run_.alive()
    assert "failed: rank 1 at step" in run_.text()
    assert "Killed: the process received SIGKILL" in run_.text()
    with started(command(config), tmp_path / "terminal.txt", fork=True) as run_:
        assert run_.wait(60) == 0
        assert not run_.alive()
    assert_same_run(tmp_path / "whole" / "runs" / "run", folder)
    last = run_.text().splitlines()[-1]
    assert re.fullmatch(r"done: .*/runs/run", last)


# Restarts after a loss of ranks


def elastic(folder, data, **settings):
    """A run of four logical ranks whose steps take a while until the file ``go`` exists; with that file."""
    go = folder / "go"
    model = {"name": f"{MODELS}.Slow", "args": {"step_s": 0.1, "until": str(go)}}
    parallel, every = {"logical_ranks": 4}, {"every": 2}
    return write_config(folder, data, model=model, parallel=parallel, checkpoint=every, **settings), go


@pytest.fixture(scope="module")
def alone(tmp_path_factory, stripes):
    """The undisturbed run on one process."""
    config, go = elastic(tmp_path_factory.mktemp("alone"), stripes)
    go.touch()
    assert run(config) == [0]
    return config.parent / "runs" / "run"


def losses(folder):
    return [json.loads(line) for line in (folder / "logs" / "losses.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_goes_on_without_the_ranks_it_has_lost(tmp_path, stripes, alone):
    """Rank 2 of four is killed; after a checkpoint there are four again, and two are killed. The bits are as of one."""
    config, go = elastic(tmp_path, stripes)
    folder = tmp_path / "runs" / "run"
    words = ("--nproc", "1:4", "--max-restarts", "2")
    with started(command(config, *words), tmp_path / "terminal.txt", fork=True) as run_:
        wait_for_steps(folder, 3)
        run_.signal(signal.SIGKILL, run_.ranks()[2])
        wait_until(lambda: len(run_.ranks()) == 3, END_S, "three ranks")
        wait_until(lambda: len(run_.ranks()) == 4, END_S, "four ranks again, after a checkpoint")
        wait_until(lambda: "starting again on 4 ranks" in run_.text(), END_S, "the reason")
        newest = (folder / "checkpoints" / "latest").read_text()
        wait_until(lambda: (folder / "checkpoints" / "latest").read_text() != newest, END_S, "a step of the four")
        for pid in run_.ranks()[1:3]:
            run_.signal(signal.SIGKILL, pid)
        wait_until(lambda: "in 1 s, restart 2 of 2" in run_.text(), END_S, "the second restart")
        go.touch()
        assert run_.wait(60) == 0
        assert not run_.alive()
    assert differences(alone, folder) == []
    first, second = losses(folder)
    assert (first["rank"], first["ranks_before"], first["ranks"], first["error"]) == (2, 4, 3, "Killed")
    assert (second["ranks_before"], second["ranks"]) == (4, 2)
    assert first["resumed_from"] <= first["step"] < second["step"]
    assert not (folder / "failure.json").exists()


@pytest.mark.parametrize(
    ("model", "starts", "said", "code"),
    [
        ({"name": f"{MODELS}.Raises", "args": {"rank": 1, "step": 3}}, 1, "ArithmeticError", 1),
        ({"name": f"{MODELS}.Hangs", "args": {"rank": 1, "step": 3, "how": "killed"}}, 2, "has failed twice", 70),
    ],
)
def test_what_would_fail_again_is_not_repeated(tmp_path, stripes, model, starts, said, code):
    """An error of the code, and a loss that occurs again at the same step."""
    config = write_config(tmp_path, stripes, model=model)
    with started(command(config, "--max-restarts", "5"), tmp_path / "terminal.txt", fork=True) as run_:
        assert run_.wait(60) == code
        assert not run_.alive()
    assert said in run_.text()
    assert len(json.loads((tmp_path / "runs" / "run" / "provenance.json").read_text())) == starts
    assert json.loads((tmp_path / "runs" / "run" / "failure.json").read_text())["rank"] == 1


@pytest.mark.slow
def test_a_signal_ends_a_run_that_waits_for_its_restart(tmp_path, stripes):
    program = tmp_path / "patient.py"
    program.write_text(
        "import sys\nfrom harness import cli\nfrom harness.engines.local import engine\n"
        "engine._LEAST_WAIT_S = 60.0\nsys.exit(cli.main(sys.argv[1:]))\n"
    )
    config, _ = elastic(tmp_path, stripes)
    words = command(config, "--max-restarts", "9")
    start = [words[0], str(program), *words[words.index("launch") :]]
    with started(start, tmp_path / "terminal.txt") as run_:
        wait_for_steps(tmp_path / "runs" / "run", 2)
        run_.signal(signal.SIGKILL, run_.ranks()[0])
        wait_until(lambda: "in 60 s, restart 1 of 9" in run_.text(), END_S, "the restart")
        run_.signal(signal.SIGTERM)
        assert run_.wait(10) == 70
        assert not run_.alive()


def devices_that_open(monkeypatch, *answers):
    """The devices 0 to 3, of which those of the next answer open."""
    remaining = list(answers)
    monkeypatch.setattr(devices, "visible_names", lambda: ["0", "1", "2", "3"])
    monkeypatch.setattr(devices, "working_names", lambda names: [name for name in names if name in remaining[0]])
    return remaining


def test_ranks_get_the_devices_that_open(tmp_path, stripes, monkeypatch):
    """Device 1 of four is lost and comes back."""
    remaining = devices_that_open(monkeypatch, "023", "0123")
    words = ["launch.nproc=4", "launch.local.min_ranks=2", "launch.max_restarts=1", "runtime.device=cuda"]
    job = launch.plan(str(elastic(tmp_path, stripes)[0]), words)
    growth = local._Growth(job)
    assert growth.left(3) == 3
    growth.start(3)
    assert growth.visible == ["0", "2", "3"]
    assert not growth.due()  # no checkpoint since that start
    remaining.pop(0)
    (job.folder / "checkpoints").mkdir(parents=True)
    (job.folder / "checkpoints" / "latest").write_text("step-4")
    monkeypatch.setattr(local, "_CHECK_S", 0.0)
    wait_until(growth.due, 10, "the device that has come back")
    assert (growth.size, growth.visible) == (4, ["0", "2", "3", "1"])


def test_a_question_about_devices_that_fails_is_asked_again(tmp_path, stripes, monkeypatch):
    """Such as when no process can be started."""
    devices_that_open(monkeypatch, "0")
    job = launch.plan(str(elastic(tmp_path, stripes)[0]), ["launch.nproc=2", "runtime.device=cuda"])
    growth = local._Growth(job)
    growth.left(1)
    growth.start(1)
    monkeypatch.setattr(local, "_CHECK_S", 0.0)
    (job.folder / "checkpoints").mkdir(parents=True)
    for step, works in ((4, False), (8, True)):
        answer = "0123".__contains__ if works else (lambda name: 1 / 0)
        monkeypatch.setattr(devices, "working_names", lambda names, answer=answer: [*filter(answer, names)])
        (job.folder / "checkpoints" / "latest").write_text(f"step-{step}")
        if not works:
            assert not growth.due()
            wait_until(lambda: not growth.due() and growth._asked is None, 10, "the question has failed")
    wait_until(growth.due, 10, "the second device")
    assert growth.visible == ["0", "1"]


class Killed:
    """Stands for a start on two ranks, of which the second is killed."""

    def follow(self, meanwhile):
        return EngineReport([RankExit.from_code(1, -9), RankExit.now(0, Cause.PEER_LOST, step=5)])


@pytest.mark.parametrize(
    ("devices", "said"), [("", "launch.local.min_ranks is 1"), ("01", "launch.max_restarts=1 is used up")]
)
def test_a_run_that_cannot_start_again_says_why(tmp_path, stripes, monkeypatch, capsys, devices, said):
    devices_that_open(monkeypatch, devices)
    monkeypatch.setattr(local, "_start", lambda *_: Killed())
    words = ["launch.nproc=2", "launch.local.min_ranks=1", "launch.max_restarts=1", "runtime.device=cuda"]
    run_ = local.RestartedRun(launch.plan(str(elastic(tmp_path, stripes)[0]), words))
    run_._num_restarts = int(bool(devices))
    assert run_.follow().exits[0].rank == 1
    assert said in capsys.readouterr().err


def test_no_device_is_left(tmp_path, stripes, monkeypatch):
    devices_that_open(monkeypatch, "")
    job = launch.plan(str(elastic(tmp_path, stripes)[0]), ["launch.nproc=4", "runtime.device=cuda"])
    assert local._Growth(job).left(3) == 0


@pytest.mark.parametrize(
    ("words", "batch", "said"),
    [
        (["nproc=2", "local.min_ranks=3", "max_restarts=1"], {"global": 8}, "--nproc MIN:MAX"),
        (["nproc=2", "local.min_ranks=1"], {"global": 8}, "--max-restarts"),
        (
            ["nproc=2", "local.min_ranks=1", "max_restarts=1"],
            {"global": None, "per_rank": 4},
            "parallel.logical_ranks=2",
        ),
    ],
)
def test_ranges_of_ranks_that_cannot_work(tmp_path, stripes, words, batch, said):
    config, words = str(write_config(tmp_path, stripes, batch=batch)), [f"launch.{word}" for word in words]
    for call in (local.render, local.start):
        with pytest.raises(LaunchError) as caught:
            call(launch.plan(config, words))
        assert said in str(caught.value)


def test_more_ranks_than_logical_ranks_are_refused_before_any_starts(tmp_path, stripes):
    config = str(elastic(tmp_path, stripes)[0])
    with pytest.raises(ConfigError, match="4 logical ranks cannot be computed by 8 processes"):
        launch.plan(config, ["launch.nproc=8"])
    assert launch.plan(config, ["launch.nproc=8", "launch.local.min_ranks=1", "launch.max_restarts=1"])


def test_numbers_of_ranks_that_fit(tmp_path, stripes):
    """Without logical ranks, those that divide the batch of 8 rows."""
    plain = launch.plan(str(write_config(tmp_path / "plain", stripes)), [])
    assert [size for size in range(1, 9) if local.fits(plain, size)] == [1, 2, 4, 8]
    logical = launch.plan(str(elastic(tmp_path / "logical", stripes)[0]), ["launch.nproc=3"])
    assert [size for size in range(1, 9) if local.fits(logical, size)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_stop_writes_a_checkpoint(tmp_path, stripes):
    config = write_config(tmp_path, stripes, model=SLOW, train={"epochs": 1000}, checkpoint={"every": 1000})
    folder = tmp_path / "runs" / "run"
    with started(command(config), tmp_path / "terminal.txt", fork=True) as run_:
        wait_for_steps(folder, 1)
        run_.signal(signal.SIGINT)
        assert run_.wait(END_S) == 75
        assert not run_.alive()
    assert int((folder / "checkpoints" / "latest").read_text().removeprefix("step-")) < 50
    assert "stopped early with a checkpoint" in run_.text().splitlines()[-1]


@pytest.mark.slow
def test_second_signal_kills_the_ranks(tmp_path, stripes):
    """Also ranks that do not react, since SIGSTOP has frozen them."""
    config = write_config(tmp_path, stripes, model=SLOW)
    with started(command(config), tmp_path / "terminal.txt", fork=True) as run_:
        wait_for_steps(tmp_path / "runs" / "run", 2)
        for pid in run_.ranks():
            os.kill(pid, signal.SIGSTOP)
        run_.signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in run_.text(), 10, "the launcher stops")
        run_.signal(signal.SIGTERM)
        assert run_.wait(10) == 143
        assert not run_.alive()
    assert "stopping (SIGTERM)" in run_.text()
    assert "ended on request" in run_.text()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_end_with_a_killed_launcher(tmp_path, stripes, world_size):
    config = write_config(tmp_path, stripes, model=SLOW, train={"epochs": 1000})
    with started(command(config, "--nproc", str(world_size)), tmp_path / "terminal.txt", fork=True) as run_:
        wait_for_steps(tmp_path / "runs" / "run", 2)
        run_.signal(signal.SIGKILL)
        run_.process.wait()
        wait_until(lambda: not run_.alive(), END_S, "all ranks gone")


def test_configuration_errors_are_reported_before_the_start(tmp_path, stripes):
    config = write_config(tmp_path, stripes)
    with started(command(config, "train.epoch=3"), tmp_path / "terminal.txt") as run_:
        assert run_.wait(60) == 2
    assert run_.text().count("did you mean train.epochs?") == 1
    with started(command(config, "task.train_csv=gone.csv"), tmp_path / "terminal.txt") as run_:
        assert run_.wait(60) == 65
    assert "command line: task.train_csv: gone.csv: no such annotation file" in run_.text()
    assert not (tmp_path / "runs").exists()


def test_train_command_without_a_clone(tmp_path, monkeypatch):
    """In a clone it is driver.py; an installed wheel has none, and trains as a module."""
    assert base.train_command(str(ROOT)) == [str(ROOT / "driver.py")]
    package = tmp_path / "site-packages" / "harness" / "engines" / "base.py"
    monkeypatch.setattr(base, "__file__", str(package))
    assert base.train_command(str(tmp_path)) == ["-m", "harness", "train"]
