"""launch/multi_node.sh on two nodes, which are network namespaces of this machine."""

from __future__ import annotations

import shutil
import signal
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.errors import EXIT_STOPPED
from tests.conftest import ROOT
from tests.end_to_end.experiment import assert_same_run, run_folder, write_config
from tests.end_to_end.processes import END_S, START_S, drivers, started, wait_for_steps
from tests.engines.nodes import ADDRESSES, two_nodes
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
        with (
            master_has_a_name(nodes),
            launched(nodes, config, tmp_path, LAUNCHER="torchrun", MASTER_ADDR="master") as (one, two),
        ):
            codes = [node.wait(START_S) for node in (one, two)]
            assert codes == [0, 0], one.text() + two.text()
            assert "resumed from" in one.text()

    local = write_config(tmp_path / "local", data, **slow)
    assert wait_for(drivers(2, ["-c", str(local)], tmp_path / "local.txt"), START_S) == [0, 0]
    assert_same_run(run_folder(local), folder)
