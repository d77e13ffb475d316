"""The launch scripts with torch's real launchers, and driver.py without one: signals, and deaths of ranks and launcher.

A rank's own exit code can be seen where no launcher stands between (``drivers``); torch's launchers end with 1 for
whatever their ranks ended with, and print it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

import pytest

from harness.errors import EXIT_FAILURE, EXIT_STOPPED
from tests.conftest import ROOT
from tests.end_to_end.experiment import assert_same_run, record, write_config, write_images
from tests.end_to_end.processes import END_S, START_S, drivers, started, wait_for_steps, wait_until
from tests.ranks import free_port, launch_environment, wait_for

SINGLE_NODE = ROOT / "launch" / "single_node.sh"
DRIVER = ROOT / "driver.py"
SLOW = {  # two seconds an epoch, at two ranks
    "model": {"name": "tests.end_to_end.models.Slow", "args": {"step_s": 0.2}},
    "data": {"num_workers": 1},
    "train": {"epochs": 2, "log_every": 1},
    "runtime": {"device": "cpu", "timeout_s": 100},  # so that nothing ends in time by this limit
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "stripes")


def folder_of(config):
    return config.parent / "runs" / "run"


def steps(folder) -> list[int]:
    return [line["step"] for line in record(folder) if line["split"] == "train"]


def checkpoint_of(folder) -> int:
    return int((folder / "checkpoints" / "latest").read_text().removeprefix("step-"))


# With a launcher


@pytest.mark.slow
def test_launch_killed_rank_then_interrupt_then_the_end(tmp_path, data):
    """torch.distributed.launch, the same command three times."""
    config = write_config(tmp_path, data, **SLOW)
    folder, command = folder_of(config), [SINGLE_NODE, "2", config]

    with started(command, tmp_path / "killed.txt") as run:
        wait_for_steps(folder, 2)
        run.signal(signal.SIGKILL, killed := run.ranks()[1])
        assert run.wait(END_S) == 1
        assert not run.alive()
        assert f"Signal 9 (SIGKILL) received by PID {killed}" in run.text()
        assert f"exitcode  : {EXIT_FAILURE}" in run.text()  # also where it is told to end before it has ended by itself
        assert run.text().count("lost contact with the other ranks") == 1
    failure = json.loads((folder / "failure.json").read_text())
    assert failure["message"].startswith("lost contact with the other ranks")
    assert failure["step"] >= 2

    with started(command, tmp_path / "interrupted.txt") as run:
        wait_until(lambda: "launched by" in run.text(), START_S, "the second start")
        wait_for_steps(folder, 2)
        run.signal(signal.SIGINT)
        assert run.wait(END_S) != 0
        assert not run.alive()
        assert "stopped early (SIGINT)" in run.text()
    assert checkpoint_of(folder) == max(steps(folder))
    assert not (folder / "failure.json").exists()

    with started(command, tmp_path / "finished.txt") as run:
        assert run.wait(START_S) == 0
        assert "resumed from" in run.text()
        assert "FutureWarning" not in run.text()
        assert "OMP_NUM_THREADS" not in run.text()
    assert steps(folder) == list(range(1, 17))


@pytest.mark.slow
def test_torchrun_killed_launcher_then_sigterm(tmp_path, data):
    """torchrun, the same command twice."""
    config = write_config(tmp_path, data, **{**SLOW, "train": {"epochs": 3, "log_every": 1}})
    folder, command = folder_of(config), [SINGLE_NODE, "2", config]

    with started(command, tmp_path / "killed.txt", LAUNCHER="torchrun") as run:
        wait_for_steps(folder, 2)
        assert len(run.ranks()) == 2
        run.signal(signal.SIGKILL)
        run.wait(5)
        wait_until(lambda: not run.alive(), END_S, "the ranks end after their launcher")
        # By its parent or by the store, which the launcher keeps: whichever a rank looks at first.
        assert re.search(r"stopped early \((the launcher is gone|rank 0, or the launcher, is gone)\)", run.text())
    assert checkpoint_of(folder) == max(steps(folder)) < 24

    with started(command, tmp_path / "terminated.txt", LAUNCHER="torchrun") as run:
        wait_until(lambda: "resumed from" in run.text(), START_S, "the second start")
        run.signal(signal.SIGTERM)
        assert run.wait(END_S) != 0
        assert not run.alive()
        assert "stopped early (SIGTERM)" in run.text()
    assert checkpoint_of(folder) == max(steps(folder))


def test_usage_of_the_scripts(tmp_path):
    for name, arguments, words in (
        ("single_node.sh", [], "NPROC and CONFIG are needed"),
        ("single_node.sh", ["two", "c.yaml"], "NPROC must be a number of processes, not 'two'"),
        ("multi_node.sh", ["2", "c.yaml"], "not set in the environment: NNODES NODE_RANK MASTER_ADDR MASTER_PORT"),
    ):
        with started([ROOT / "launch" / name, *arguments], tmp_path / "usage.txt") as run:
            assert run.wait(5) == 2
            assert words in run.text()
            assert "usage: " in run.text()
    node = {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with started([ROOT / "launch" / "multi_node.sh", "2", "c.yaml"], tmp_path / "usage.txt", **node) as run:
        assert run.wait(5) == 2
        assert "NODE_RANK must be 0 to 1, not '2'" in run.text()
    with started([ROOT / "launch" / "single_node.sh", "2", "c.yaml"], tmp_path / "usage.txt", LAUNCHER="srun") as run:
        assert run.wait(5) == 2
        assert "LAUNCHER must be torch.distributed.launch or torchrun, not 'srun'" in run.text()


# Without one


@pytest.mark.slow
def test_local_rank_in_every_spelling(tmp_path, data):
    """--local_rank=0 beside --local-rank=1 in one gang, and neither in one process."""
    config = write_config(tmp_path, data, train={"epochs": 1})
    port = free_port()
    command = [sys.executable, DRIVER]
    with (
        started(
            [*command, "--local_rank=0", "-c", config], tmp_path / "0.txt", **launch_environment(0, 2, port)
        ) as one,
        started(
            [*command, "--local-rank=1", "-c", config], tmp_path / "1.txt", **launch_environment(1, 2, port)
        ) as two,
    ):
        assert [one.wait(START_S), two.wait(START_S)] == [0, 0], one.text() + two.text()
    with started([*command, "-c", config, "name=alone"], tmp_path / "alone.txt") as alone:
        assert alone.wait(START_S) == 0, alone.text()


def test_signals_stop_all_ranks_with_a_checkpoint(tmp_path, data):
    """Whichever rank hears of it; the same command each time goes on, and in the end it is the unbroken run."""
    model = {"name": SLOW["model"]["name"], "args": {"step_s": 0.05}}
    settings = {**SLOW, "model": model, "train": {"epochs": 8, "log_every": 1}}
    config = write_config(tmp_path / "stopped", data, **settings)
    folder = folder_of(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        for signalled in ([0], [1], [0, 1]):
            before = len(steps(folder)) if folder.exists() else 0
            terminal = tmp_path / f"{number.name}-{signalled}.txt"
            ranks = drivers(2, ["-c", str(config)], terminal)
            try:
                wait_for_steps(folder, before + 3)
                for rank in signalled:
                    os.kill(ranks[rank][0].pid, number)
            finally:
                codes = wait_for(ranks, END_S)
            assert codes == [EXIT_STOPPED, EXIT_STOPPED], terminal.read_text()
            assert checkpoint_of(folder) == max(steps(folder)) < 64
            assert not (folder / "failure.json").exists()
            assert terminal.read_text().count("stopped early") == 1
    assert wait_for(drivers(2, ["-c", str(config)], tmp_path / "last.txt"), END_S) == [0, 0]
    assert steps(folder) == list(range(1, 65))
    unbroken = write_config(tmp_path / "unbroken", data, **settings)
    assert wait_for(drivers(2, ["-c", str(unbroken)], tmp_path / "unbroken.txt"), END_S) == [0, 0]
    assert_same_run(folder_of(unbroken), folder)


def test_signal_to_every_process_of_a_rank(tmp_path, data):
    """Launchers and schedulers signal loader processes too; these must live until the checkpoint is written."""
    config = write_config(tmp_path, data, **SLOW)
    with started([sys.executable, DRIVER, "-c", config], tmp_path / "terminal.txt") as run:
        wait_for_steps(folder_of(config), 2)
        assert len(run.alive()) > 1
        os.killpg(run.process.pid, signal.SIGTERM)
        assert run.wait(END_S) == EXIT_STOPPED, run.text()
        assert not run.alive()


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_ends_the_other(tmp_path, data, victim):
    config = write_config(tmp_path, data, **SLOW)
    folder, terminal = folder_of(config), tmp_path / "terminal.txt"
    ranks = drivers(2, ["-c", str(config)], terminal)
    try:
        wait_for_steps(folder, 2)
        begin = time.monotonic()
        ranks[victim][0].kill()
    finally:
        codes = wait_for(ranks, END_S)
    assert time.monotonic() - begin < 20
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == EXIT_FAILURE
    failure = json.loads((folder / "failure.json").read_text())
    assert failure["rank"] == 1 - victim
    assert failure["exit_code"] == EXIT_FAILURE
    assert failure["message"].startswith("lost contact with the other ranks")
    assert terminal.read_text().count("lost contact with the other ranks") == 1


def test_frozen_rank_ends_the_other_by_the_limit(tmp_path, data):
    """A rank that neither works nor dies, as on a hung disk: runtime.timeout_s is how long the others wait."""
    config = write_config(tmp_path, data, **{**SLOW, "runtime": {"device": "cpu", "timeout_s": 4}})
    folder, terminal = folder_of(config), tmp_path / "terminal.txt"
    ranks = drivers(2, ["-c", str(config)], terminal)
    try:
        wait_for_steps(folder, 2)
        os.kill(ranks[1][0].pid, signal.SIGSTOP)
        ranks[0][0].join(END_S)
        assert ranks[0][0].exitcode == EXIT_FAILURE
        os.kill(ranks[1][0].pid, signal.SIGCONT)
    finally:
        codes = wait_for(ranks, END_S)
    assert codes == [EXIT_FAILURE, EXIT_FAILURE]
    assert "lost contact with the other ranks" in terminal.read_text()
