"""launch/multi_node.sh on two nodes, which are network namespaces of this machine."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from harness.errors import EXIT_FAILURE, EXIT_STOPPED
from tests.conftest import ROOT
from tests.end_to_end.experiment import assert_same_run, run_folder, write_config
from tests.end_to_end.processes import END_S, START_S, drivers, started, wait_for_steps
from tests.engines.nodes import ADDRESSES, cut, two_nodes
from tests.ranks import wait_for

MULTI_NODE = ROOT / "launch" / "multi_node.sh"


@contextmanager
def master_has_a_name(nodes):
    """Give node 0 the name "master". On node 0 itself it resolves to a loopback address, as in Debian's /etc/hosts."""
    folders = [Path("/etc/netns") / name for name in nodes]  # ip netns exec mounts it over /etc
    try:
        for folder, address in zip(folders, ("127.0.1.1", ADDRESSES[0]), strict=True):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n{address} master\n")
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def launched(nodes, config, folder, **environ: str):
    """Run launch/multi_node.sh with one rank on each node."""
    common = {"NNODES": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", **environ}
    commands = [["ip", "netns", "exec", name, MULTI_NODE, "1", config] for name in nodes]
    with (
        started(commands[0], folder / "node0.txt", NODE_RANK="0", **common) as one,
        started(commands[1], folder / "node1.txt", NODE_RANK="1", **common) as two,
    ):
        yield one, two


@pytest.mark.slow
def test_two_nodes_train_like_two_ranks_of_one_node(tmp_path, data, monkeypatch):
    """The run is started, stopped by a signal to one node, and resumed with torchrun."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # the harness finds the interface itself
    slow = {"model": {"name": "tests.end_to_end.models.Slow", "args": {"step_s": 0.1}}, "train": {"log_every": 1}}
    config = write_config(tmp_path / "nodes", data, **slow)
    folder = run_folder(config)
    with two_nodes() as nodes:
        with launched(nodes, config, tmp_path) as (one, two):
            wait_for_steps(folder, 2)
            (rank,) = two.ranks()
            two.signal(signal.SIGTERM, rank)
            codes = [node.wait(END_S) for node in (one, two)]
            assert codes == [1, 1]
            for node in (one, two):
                assert f"exitcode  : {EXIT_STOPPED}" in node.text(), node.text()
            assert "rank 1: joined the run: 1 rank of 2 on this machine, " in two.text()
            assert re.search(r"rank 1: stopped with a checkpoint at step \d+\n", two.text())
        with (
            master_has_a_name(nodes),
            launched(nodes, config, tmp_path, LAUNCHER="torchrun", MASTER_ADDR="master") as (one, two),
        ):
            codes = [node.wait(START_S) for node in (one, two)]
            assert codes == [0, 0], one.text() + two.text()
            assert "resumed from" in one.text()
            assert re.search(r"rank 1: done at step \d+\n", two.text())
            assert "rank 1: " not in one.text()

    local = write_config(tmp_path / "local", data, **slow)
    assert wait_for(drivers(2, ["-c", str(local)], tmp_path / "local.txt"), START_S) == [0, 0]
    assert_same_run(run_folder(local), folder)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_machine_that_loses_power_ends_one_that_synchronizes_a_device(tmp_path, data, lost):
    """No connection breaks, and the main thread of the other machine waits outside of any collective. Machine 0 also
    holds the store."""
    timeout_s = 10
    model = {"name": "tests.end_to_end.models.Synchronizes", "args": {"step": 3}}
    runtime = {"device": "cpu", "timeout_s": timeout_s}
    config = write_config(tmp_path, data, model=model, runtime=runtime, train={"log_every": 1})
    words = [sys.executable, "driver.py", "-c", config]
    with two_nodes() as nodes, ExitStack() as stack:
        runs = [
            stack.enter_context(
                started(
                    words,
                    tmp_path / f"{rank}.txt",
                    fork=True,
                    network=name,
                    RANK=str(rank),
                    LOCAL_RANK="0",
                    WORLD_SIZE="2",
                    LOCAL_WORLD_SIZE="1",
                    MASTER_ADDR=ADDRESSES[0],
                    MASTER_PORT="29500",
                )  # fmt: skip
            )
            for rank, name in enumerate(nodes)
        ]
        wait_for_steps(run_folder(config), 2)
        time.sleep(1.5 * timeout_s)  # longer than the limit: both live
        assert [run.process.poll() for run in runs] == [None, None]
        cut(nodes[lost])
        runs[lost].end()
        assert runs[1 - lost].wait(timeout_s + END_S) == EXIT_FAILURE
        failure = json.loads((run_folder(config) / "failure.json").read_text())
        assert (failure["rank"], failure["cause"]) == (lost, "node_lost")
        assert f"rank {lost} failed: its process" in runs[1 - lost].text()
