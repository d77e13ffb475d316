"""The launch scripts with torch's launchers, and driver.py without one: signals, killed ranks, killed launchers.

torch's launchers print the exit codes of their ranks and exit with 1 themselves. Tests of a rank's own exit code
therefore start the ranks directly (``drivers``).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.errors import EXIT_FAILURE, EXIT_STOPPED, EXIT_USAGE
from harness.runs import console
from tests.conftest import ROOT
from tests.end_to_end.experiment import (
    assert_same_run,
    newest_checkpoint,
    of_split,
    run_folder,
    write_config,
)
from tests.end_to_end.processes import (
    END_S,
    START_S,
    Started,
    driver,
    drivers,
    shell,
    started,
    wait_for_steps,
    wait_until,
)
from tests.ranks import free_port, launch_environment, wait_for

HOST = socket.gethostname()
SINGLE_NODE = ROOT / "launch" / "single_node.sh"
DRIVER = ROOT / "driver.py"
SLOW = {  # two seconds per epoch on two ranks
    "model": {"name": "tests.end_to_end.models.Slow", "args": {"step_s": 0.2}},
    "data": {"num_workers": 1},
    "train": {"epochs": 2, "log_every": 1},
    "runtime": {"device": "cpu", "timeout_s": 100},  # so long that no test passes because of it
}


def steps(folder) -> list[int]:
    return [line["step"] for line in of_split(folder, "train")]


def checkpoint_of(folder) -> int:
    return int(newest_checkpoint(folder).name.removeprefix("step-"))


# With a launcher


@pytest.mark.slow
def test_torch_launch_killed_rank_then_sigint_then_finished(tmp_path, data):
    """The same command twice, with torch.distributed.launch; then without a launcher."""
    config = write_config(tmp_path, data, **SLOW)
    folder, command = run_folder(config), [SINGLE_NODE, "2", config]

    with started(command, tmp_path / "killed.txt") as run:
        wait_for_steps(folder, 2)
        run.signal(signal.SIGKILL, killed := run.ranks()[1])
        assert run.wait(END_S) == 1
        assert not run.alive()
        assert f"Signal 9 (SIGKILL) received by PID {killed}" in run.text()
        assert f"exitcode  : {EXIT_FAILURE}" in run.text()  # also if the launcher stops it first
        assert run.text().count("lost contact with the other ranks") == 1
    failure = json.loads((folder / "failure.json").read_text())
    assert (failure["rank"], failure["message"]) == (
        1,
        f"its process {killed} ended without a report (on {HOST})",
    )
    assert failure["step"] >= 2

    with started(command, tmp_path / "interrupted.txt") as run:
        wait_until(lambda: "launcher: " in run.text(), START_S, "the second start")
        wait_for_steps(folder, 2)
        run.signal(signal.SIGINT)
        assert run.wait(END_S) != 0
        assert not run.alive()
        assert "stopped early (SIGINT)" in run.text()
        assert "FutureWarning" not in run.text()
        assert "OMP_NUM_THREADS" not in run.text()
    assert checkpoint_of(folder) == max(steps(folder))
    assert not (folder / "failure.json").exists()

    assert wait_for(drivers(2, ["-c", str(config)], tmp_path / "finished.txt"), START_S) == [0, 0]
    assert "resumed from" in (tmp_path / "finished.txt").read_text()
    assert steps(folder) == list(range(1, 17))


@pytest.mark.slow
def test_torchrun_killed_launcher_then_sigterm_then_resumed(tmp_path, data):
    """The same command twice, with torchrun."""
    config = write_config(tmp_path, data, **{**SLOW, "train": {"epochs": 3, "log_every": 1}})
    folder, command = run_folder(config), [SINGLE_NODE, "2", config]

    with started(command, tmp_path / "killed.txt", LAUNCHER="torchrun") as run:
        wait_for_steps(folder, 2)
        assert len(run.ranks()) == 2
        run.signal(signal.SIGKILL)
        run.wait(5)
        wait_until(lambda: not run.alive(), END_S, "the ranks end after their launcher")
        # A rank notices that its parent or the launcher's store is gone, whichever it checks first.
        assert re.search(r"stopped early \((the launcher is gone|rank 0, or the launcher, is gone)\)", run.text())
    assert checkpoint_of(folder) == max(steps(folder)) < 24

    with started(command, tmp_path / "terminated.txt", LAUNCHER="torchrun") as run:
        wait_until(lambda: "resumed from" in run.text(), START_S, "the second start")
        run.signal(signal.SIGTERM)
        assert run.wait(END_S) != 0
        assert not run.alive()
        assert "stopped early (SIGTERM)" in run.text()
    assert checkpoint_of(folder) == max(steps(folder))


@pytest.mark.slow
def test_two_launches_at_once_do_not_share_a_port(tmp_path, data):
    """No port is hard-coded, and two runs launched at once both finish."""
    for path in [*(ROOT / "harness").rglob("*.py"), ROOT / "driver.py", *(ROOT / "configs").glob("*.yaml")]:
        if "apex" not in path.parts:
            assert not re.search(r"\b(29500|12355|MASTER_PORT\W+\d\d)", path.read_text()), path
    configs = [write_config(tmp_path / name, data, train={"epochs": 1}) for name in ("one", "two")]
    words = [["launch/single_node.sh", "2", str(config)] for config in configs]
    places = [config.with_name("terminal") for config in configs], [config.parent for config in configs]
    with ThreadPoolExecutor() as launch:
        assert list(launch.map(shell, words, *places)) == [0, 0]


NODE_2_OF_2 = {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("script", "arguments", "environ", "message"),
    [
        ("single_node.sh", [], {}, "NPROC and CONFIG are needed"),
        ("single_node.sh", ["two", "c.yaml"], {}, "NPROC must be a number of processes, not 'two'"),
        (
            "single_node.sh",
            ["2", "c.yaml"],
            {"LAUNCHER": "srun"},
            "LAUNCHER must be torch.distributed.launch or torchrun, not 'srun'",
        ),
        (
            "multi_node.sh",
            ["2", "c.yaml"],
            {},
            "not set in the environment: NNODES NODE_RANK MASTER_ADDR MASTER_PORT",
        ),
        ("multi_node.sh", ["2", "c.yaml"], NODE_2_OF_2, "NODE_RANK must be 0 to 1, not '2'"),
    ],
)
def test_usage_errors_of_the_scripts(tmp_path, script, arguments, environ, message):
    with started([ROOT / "launch" / script, *arguments], tmp_path / "usage.txt", **environ) as process:
        assert process.wait(5) == 2
        assert message in process.text()
        assert "usage: " in process.text()


# Without a launcher


@pytest.mark.slow
def test_signal_to_any_rank_stops_all_with_a_checkpoint(tmp_path, data):
    """Each start resumes the run, whichever rank is signalled. The finished run equals an unbroken one."""
    model = {"name": SLOW["model"]["name"], "args": {"step_s": 0.05}}
    settings = {**SLOW, "model": model, "train": {"epochs": 4, "log_every": 1}}
    config = write_config(tmp_path / "stopped", data, **settings)
    folder = run_folder(config)
    for number, signalled in ((signal.SIGTERM, [0]), (signal.SIGINT, [1]), (signal.SIGTERM, [0, 1])):
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
        assert checkpoint_of(folder) == max(steps(folder)) < 32
        assert not (folder / "failure.json").exists()
        assert terminal.read_text().count("stopped early") == 1
    assert wait_for(drivers(2, ["-c", str(config)], tmp_path / "last.txt"), END_S) == [0, 0]
    assert steps(folder) == list(range(1, 33))
    unbroken = write_config(tmp_path / "unbroken", data, **settings)
    assert wait_for(drivers(2, ["-c", str(unbroken)], tmp_path / "unbroken.txt"), END_S) == [0, 0]
    assert_same_run(run_folder(unbroken), folder)


def test_signal_to_every_process_of_a_rank(tmp_path, data):
    """Launchers and schedulers also signal loader workers, which must live until the checkpoint is written."""
    config = write_config(tmp_path, data, **SLOW)
    with started([sys.executable, DRIVER, "-c", config], tmp_path / "terminal.txt", fork=True) as run:
        wait_for_steps(run_folder(config), 2)
        assert len(run.alive()) > 1
        os.killpg(run.process.pid, signal.SIGTERM)
        assert run.wait(END_S) == EXIT_STOPPED, run.text()
        assert not run.alive()


def test_remaining_rank_exits_after_a_peer_is_killed(tmp_path, data):
    config = write_config(tmp_path, data, **SLOW)
    folder, terminal = run_folder(config), tmp_path / "terminal.txt"
    ranks = drivers(2, ["-c", str(config)], terminal)
    try:
        wait_for_steps(folder, 2)
        begin = time.monotonic()
        ranks[0][0].kill()
    finally:
        codes = wait_for(ranks, END_S)
    assert time.monotonic() - begin < 20
    assert codes == [-signal.SIGKILL, EXIT_FAILURE]
    failure = json.loads((folder / "failure.json").read_text())
    assert (failure["rank"], failure["cause"], failure["exit_code"]) == (0, "node_lost", EXIT_FAILURE)
    assert failure["message"].startswith(f"its process {ranks[0][0].pid} ended without a report")
    assert terminal.read_text().count("lost contact with the other ranks") == 1


@pytest.mark.slow
def test_second_start_in_the_same_run_folder_is_refused(tmp_path, data):
    """The first start is not disturbed."""
    config = write_config(tmp_path, data, **{**SLOW, "train": {"epochs": 100, "log_every": 1}})
    folder = run_folder(config)
    first = driver(["-c", str(config)], {}, tmp_path / "first.txt")
    try:
        wait_for_steps(folder, 1)
        assert wait_for(drivers(1, ["-c", str(config)], tmp_path / "second.txt"), START_S) == [EXIT_USAGE]
        assert "another process is already training in this run folder" in (tmp_path / "second.txt").read_text()
        assert not (folder / "failure.json").exists()
        assert first[0].is_alive()
        os.kill(first[0].pid, signal.SIGTERM)
    finally:
        assert wait_for([first], END_S) == [EXIT_STOPPED]
    assert len(json.loads((folder / "provenance.json").read_text())) == 1


# At any moment


def importing(run: Started) -> bool:
    """True once a process, which may have exited, is importing torch."""
    return "libtorch" in Path(f"/proc/{run.process.pid}/maps").read_text()


def test_interrupt_while_modules_are_imported(tmp_path, data):
    config = write_config(tmp_path, data)
    with started([sys.executable, DRIVER, "-c", config], tmp_path / "terminal.txt") as run:
        wait_until(lambda: importing(run), START_S, "torch is imported")
        run.signal(signal.SIGINT)
        assert run.wait(END_S) == 130, run.text()
    (line,) = run.text().splitlines()
    assert "(SIGINT)" in line
    assert not run_folder(config).exists()


def test_signal_while_the_ranks_meet(tmp_path, data):
    config = write_config(tmp_path, data, runtime={"timeout_s": 100})
    port = free_port()
    environ = launch_environment(0, 2, port)
    with started([sys.executable, DRIVER, "-c", config], tmp_path / "terminal.txt", fork=True, **environ) as run:
        listens = f":{port:04X} 00000000:0000 0A"
        tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
        wait_until(
            lambda: any(listens in table.read_text().replace("0" * 32, "0" * 8) for table in tables if table.exists()),
            START_S, "rank 0 waits for rank 1",
        )  # fmt: skip
        run.signal(signal.SIGTERM)
        assert run.wait(END_S) == 143, run.text()
    assert run.text().splitlines()[-1].startswith("stopped (SIGTERM) before the run began")
    assert "Traceback" not in run.text()


def test_second_signal_ends_at_once(tmp_path, data):
    """In a step that does not end, which the first one waits for."""
    model = {"name": "tests.end_to_end.models.Hangs", "args": {"rank": 0, "step": 2, "how": "announced sleep"}}
    config = write_config(tmp_path, data, model=model)
    with started([sys.executable, DRIVER, "-c", config], tmp_path / "terminal.txt", fork=True) as run:
        wait_until(lambda: "the model sleeps" in run.text(), START_S, "the second step")
        time.sleep(console.LONG_S)
        run.signal(signal.SIGINT)
        run.signal(signal.SIGHUP)  # the system delivers the lower number first if it finds both
        wait_until(lambda: "): a checkpoint is written first, after this step (" in run.text(), 10, "the message")
        time.sleep(1.1)
        assert run.process.poll() is None
        run.signal(signal.SIGINT)
        assert run.wait(10) == 130, run.text()
    assert run.text().splitlines()[-1] == "exited immediately (SIGINT)"
    assert "Traceback" not in run.text()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "torchrun"])
def test_interrupt_before_the_run_begins(tmp_path, data, engine):
    config = write_config(tmp_path, data)
    command = [sys.executable, "-m", "harness", "launch", "-c", config, "--engine", engine, "--nproc", "2"]

    def begun():  # more than one process does not suffice: importing torch starts some
        return run.ranks() or any("TORCHELASTIC_ERROR_FILE" in environ for environ in run.alive().values())

    with started(command, tmp_path / "terminal.txt") as run:
        wait_until(begun, START_S, "the engine has started")
        run.signal(signal.SIGINT)
        assert run.wait(END_S) == 130, run.text()
        assert not run.alive()
    assert "stopping (SIGINT): every rank will write a checkpoint" in run.text()
    assert run.text().splitlines()[-1].startswith("stopped before the run began")
    assert "Traceback" not in run.text()


# Without a terminal


@pytest.mark.slow
def test_lost_terminal_does_not_end_a_run(tmp_path, data):
    """The terminal closes while it shows the progress bar; the log goes on."""
    config = write_config(tmp_path, data, **{**SLOW, "data": {"num_workers": 0}})
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "harness", "launch", "--nproc", "2", "-c", str(config)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, cwd=ROOT, env=environ, start_new_session=True
    )
    try:
        os.close(theirs)
        wait_for_steps(run_folder(config), 1)
        os.close(ours)
        assert process.wait(START_S) == 0
    finally:
        process.kill()
    assert steps(run_folder(config)) == list(range(1, 17))
    assert "next: " in (run_folder(config) / "logs" / "rank-0.log").read_text().splitlines()[-1]


# Without data


def loader_workers(run: Started) -> list[int]:
    """Process ids of the loader workers of a single rank."""
    return [pid for pid in run.alive() if pid != run.process.pid]


@pytest.mark.parametrize("pause_s", [0, 1])
def test_signal_while_the_loader_workers_deliver_nothing(tmp_path, data, pause_s):
    """Stopped workers stand for a disk that does not answer, between steps and in a wait for a batch."""
    config = write_config(tmp_path, data, **SLOW)
    with started([sys.executable, DRIVER, "-c", config], tmp_path / "terminal.txt", fork=True) as run:
        wait_for_steps(run_folder(config), 2)
        for worker in (workers := loader_workers(run)):
            run.signal(signal.SIGSTOP, worker)
        time.sleep(pause_s)  # after 1 s, the batches that were ready are used
        run.signal(signal.SIGTERM)
        assert run.wait(END_S) == EXIT_STOPPED, run.text()
        assert workers
        assert not run.alive()
    assert checkpoint_of(run_folder(config)) == max(steps(run_folder(config)))


@pytest.mark.slow
def test_small_shared_memory_is_an_error_that_names_the_remedy(tmp_path, data):
    """In a mount namespace whose /dev/shm has 1 MiB. Docker's default is 64 MiB."""
    mount = "mount -t tmpfs -o size=1m shm /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount file systems")
    config = write_config(tmp_path, data, task={"image_size": [600, 600]}, data={"num_workers": 1})
    train = shlex.join([sys.executable, str(DRIVER), "-c", str(config)])
    check = shlex.join([sys.executable, "-m", "harness", "check", "-c", str(config)])
    script = f"{mount} && {train}; echo train $?; {check}; echo check $?"
    with started(["unshare", "-m", "sh", "-c", script], tmp_path / "terminal.txt") as run:
        assert run.wait(START_S) == 0
        text = run.text()
    assert "train 70" in text
    assert "check 2" in text
    assert "error: /dev/shm (" in text
    assert "a loader worker could not put a batch of 2.7 MiB into shared memory" in text
    assert "need up to 8.2 MiB in /dev/shm" in text
    assert text.count("docker run --shm-size=8g") == 2
    assert "Traceback" not in text
