"""Several machines under torchrun, as network namespaces: same weights, lost and joining machines, network failures."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import ExitStack, suppress

import pytest

from harness.tools.compare.exactness import differences
from tests.end_to_end.experiment import assert_same_run, losses, record, run, write_config
from tests.end_to_end.processes import END_S, Started, started, wait_for_steps, wait_until
from tests.engines.nodes import ADDRESSES, cut, mend, two_nodes

START_S = 90  # until two machines train, each with a process to follow it, a launcher and a rank: six times torch
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes():
    with two_nodes() as names:
        yield names


class Experiment:
    """A run that is slow until ``hurry``, and the same run unbroken on one machine."""

    def __init__(self, folder, data, timeout_s=30, **settings):
        self.base, self.go = folder, folder / "go"
        self.settings = {
            "model": {"name": "tests.end_to_end.models.Slow", "args": {"step_s": 0.25, "until": str(self.go)}},
            "data": {"shard": "global"},
            "train": {"epochs": 12, "log_every": 1},
            "checkpoint": {"every": 2},
            "runtime": {"device": "cpu", "timeout_s": timeout_s},
            **settings,
        }
        self.data = data
        self.config = write_config(folder / "nodes", data, **self.settings)
        self.folder = self.config.parent / "runs" / "run"

    def hurry(self):
        self.go.write_text("")

    def starts(self):
        """World sizes of the starts so far."""
        with suppress(OSError, ValueError):
            return [start["world_size"] for start in json.loads((self.folder / "provenance.json").read_text())]
        return []

    def unbroken(self, num_processes=2):
        self.hurry()
        config = write_config(self.base / "unbroken", self.data, **self.settings)
        assert run(config, num_processes) == [0] * num_processes
        return config.parent / "runs" / "run"


class Machine:
    """A namespace, and what is started on it."""

    def __init__(self, stack: ExitStack, name: str, experiment: Experiment) -> None:
        self.name, self._stack, self._experiment, self._starts = name, stack, experiment, 0
        self.run: Started

    def launch(self, *words: str) -> None:
        self._starts += 1
        command = [sys.executable, "-m", "harness", "launch", "-c", self._experiment.config, "--engine", "torchrun",
                   *words, f"launch.torchrun.rendezvous={ADDRESSES[0]}:29400"]  # fmt: skip
        terminal = self._experiment.base / f"{self.name}-{self._starts}.txt"
        self.run = self._stack.enter_context(started(command, terminal, fork=True, network=self.name))

    def lose(self) -> None:
        """Kill everything on the machine at once."""
        for pid in sorted(self.run.alive(), reverse=True):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.run.process.wait()

    def wait(self, timeout_s: float) -> int:
        code = self.run.wait(timeout_s)
        assert not self.run.alive(), self.run.text()
        return code


@pytest.fixture
def machines(nodes, request):
    """Creates the two machines of an experiment; processes left on them end with the test."""
    with ExitStack() as stack:
        yield lambda experiment: [Machine(stack, name, experiment) for name in nodes]


def wait_for_more_steps(folder, count):
    wait_for_steps(folder, len([line for line in record(folder) if line["split"] == "train"]) + count)


def test_machine_is_lost_and_another_joins(tmp_path, stripes, machines):
    """Two machines, one, two again. Each lost machine uses a restart; a machine that joins uses none."""
    experiment = Experiment(tmp_path, stripes)
    here, there = machines(experiment)
    words = ("--nnodes", "1:2", "--max-restarts", "1")
    here.launch(*words)
    there.launch(*words)
    wait_for_steps(experiment.folder, 5, START_S)
    there.lose()
    wait_until(lambda: experiment.starts() == [2, 1], END_S + START_S, "the restart")
    wait_for_more_steps(experiment.folder, 2)
    there.launch(*words)
    wait_until(lambda: experiment.starts() == [2, 1, 2], START_S, "a machine joins")
    wait_for_more_steps(experiment.folder, 2)
    experiment.hurry()
    assert [here.wait(START_S), there.wait(END_S)] == [0, 0], here.run.text() + there.run.text()
    assert here.run.text().splitlines()[-1].startswith("done: ")

    unbroken = experiment.unbroken()
    assert losses(experiment.folder) == pytest.approx(losses(unbroken), abs=1e-5)
    assert [line["step"] for line in record(experiment.folder)] == [line["step"] for line in record(unbroken)]
    epochs = [line for line in record(experiment.folder) if "rows_used" in line and line["split"] == "epoch"]
    assert [line["rows_used"] for line in epochs] == [61] * 12


def test_the_loss_of_a_machine_leaves_the_bits(tmp_path, stripes, machines):
    """Four logical ranks on two machines, then on the one that is left: the bits of one process."""
    experiment = Experiment(tmp_path, stripes, parallel={"logical_ranks": 4})
    here, there = machines(experiment)
    for machine in (here, there):
        machine.launch("--nnodes", "1:2", "--nproc", "2", "--max-restarts", "1")
    wait_for_steps(experiment.folder, 5, START_S)
    there.lose()
    wait_until(lambda: experiment.starts() == [4, 2], END_S + START_S, "the restart")
    experiment.hurry()
    assert here.wait(START_S) == 0, here.run.text()
    assert differences(experiment.unbroken(1), experiment.folder) == []


def test_failures_that_end_and_that_do_not(tmp_path, stripes, machines):
    """Without restarts, a long network failure ends both machines with a report. A short one is waited out, a killed
    rank uses a restart on both, and a stop uses none. The result is that of one machine, bit for bit."""
    experiment = Experiment(tmp_path, stripes, timeout_s=12)
    here, there = machines(experiment)
    for rank, machine in enumerate((here, there)):
        machine.launch("--nnodes", "2", f"launch.torchrun.node_rank={rank}")
    wait_for_steps(experiment.folder, 3, START_S)
    cut(there.name)
    time.sleep(18)
    mend(there.name)
    begun = time.monotonic()
    assert [here.wait(END_S), there.wait(END_S)] == [70, 70]
    assert time.monotonic() - begun < END_S
    for machine in (here, there):
        assert "lost contact with the other ranks" in machine.run.text()
    assert "failed: rank " in here.run.text()

    for machine in (here, there):
        machine.launch("--nnodes", "2", "--max-restarts", "1")
    wait_until(lambda: experiment.starts() == [2, 2], START_S, "the second start")
    wait_for_more_steps(experiment.folder, 2)
    cut(there.name)
    time.sleep(6)
    mend(there.name)
    wait_for_more_steps(experiment.folder, 2)
    assert experiment.starts() == [2, 2]
    there.run.signal(signal.SIGKILL, there.run.ranks()[0])
    wait_until(lambda: experiment.starts() == [2, 2, 2], START_S, "the restart")
    wait_for_more_steps(experiment.folder, 2)
    there.run.signal(signal.SIGTERM)
    assert [here.wait(END_S), there.wait(END_S)] == [75, 75], here.run.text() + there.run.text()

    experiment.hurry()
    assert run(experiment.config, 2) == [0, 0]
    assert_same_run(experiment.unbroken(), experiment.folder)


def test_wrong_interface_is_explained(tmp_path, stripes, machines):
    here, there = machines(Experiment(tmp_path, stripes))
    for machine, words in ((here, "launch.interface=lo"), (there, "launch.interface=eth7")):
        machine.launch("--nnodes", "2", words)
    assert [here.wait(START_S), there.wait(START_S)] == [2, 2]
    assert "interface lo (127.0.0.1) cannot reach other machines" in here.run.text()
    assert "this machine has no network interface eth7 with an IPv4 address" in there.run.text()
    assert f"set launch.interface to one of: lo (127.0.0.1), eth0 ({ADDRESSES[1]})" in there.run.text()
