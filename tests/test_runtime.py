"""The launch environment is read without guessing, and collectives hold at one, two and three ranks."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager

import pytest
import torch
from torch.distributed import TCPStore

from harness.errors import DataError, LaunchError
from harness.runtime import Launch, Runtime, detect, first_host, open_runtime
from tests.ranks import free_port, run_ranks, start

TORCH = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


# detect


def test_no_variables_is_one_process():
    assert detect({}) == detect({"PATH": "/bin"}, local_rank=0) == Launch()


def test_torch_variables():
    launch = detect({**TORCH, "LOCAL_WORLD_SIZE": "2"})
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (1, 1, 4, 2)
    assert (launch.master_addr, launch.master_port, launch.elastic, launch.restart) == ("h", 29500, False, 0)
    assert detect(TORCH).local_world_size == 4


def test_torchrun_is_told_apart():
    launch = detect({**TORCH, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert launch.elastic
    assert launch.restart == 2
    assert "torch" in launch.by


@pytest.mark.parametrize("missing", TORCH)
def test_incomplete_set_names_what_was_found_and_what_misses(missing):
    environ = {name: value for name, value in TORCH.items() if name != missing}
    with pytest.raises(LaunchError) as caught:
        detect(environ)
    assert f"missing {missing}" in str(caught.value)
    assert all(f"{name}={value}" in str(caught.value) for name, value in environ.items())
    with pytest.raises(LaunchError, match=f"missing {missing}"):
        detect({**TORCH, missing: ""})


def test_local_rank_of_the_command_line():
    assert detect(TORCH, local_rank=1).local_rank == 1
    old = {name: value for name, value in TORCH.items() if name != "LOCAL_RANK"}
    assert detect(old, local_rank=1) == detect(TORCH)  # what launchers did before they set the variable
    with pytest.raises(LaunchError, match="--local_rank=0 contradicts local rank 1"):
        detect(TORCH, local_rank=0)
    with pytest.raises(LaunchError, match="--local_rank=1 contradicts local rank 0 .*one process"):
        detect({}, local_rank=1)
    with pytest.raises(LaunchError, match="--local_rank=0 contradicts local rank 1 .*srun"):
        detect(SLURM, local_rank=0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "4", "RANK=4 is out of range: from 0 to 3"),
        ("RANK", "-1", "out of range"),
        ("RANK", "one", "RANK='one' is not a whole number"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0 is out of range: 1 or more"),
        ("WORLD_SIZE", "4.0", "not a whole number"),
        ("LOCAL_RANK", "4", "LOCAL_RANK=4 is out of range"),
        ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE=5 is out of range: from 1 to 4"),
        ("LOCAL_WORLD_SIZE", "1", "LOCAL_RANK=1 is out of range"),
        ("MASTER_PORT", "70000", "out of range"),
        ("TORCHELASTIC_RESTART_COUNT", "x", "not a whole number"),
    ],
)
def test_numbers_are_checked(name, value, message):
    with pytest.raises(LaunchError, match=message):
        detect({**TORCH, name: value})


def test_slurm_step():
    launch = detect(SLURM)
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (3, 1, 4, 2)
    assert launch.master_addr == "gpu03"
    assert launch.by == "srun"
    others = [detect({**SLURM, "SLURM_PROCID": str(rank)}) for rank in range(4)]
    assert len({(other.master_addr, other.master_port) for other in others}) == 1
    assert 1024 < launch.master_port < 65536
    assert detect({**SLURM, "SLURM_JOB_ID": "123457"}).master_port != launch.master_port


def test_slurm_single_task():
    environ = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert detect(environ).world_size == 1


def test_slurm_batch_script_without_srun_is_one_process():
    environ = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert detect({**environ, "SLURM_PROCID": "0"}) == Launch()


def test_slurm_with_a_master_of_its_own():
    launch = detect({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (launch.master_addr, launch.master_port, launch.by) == ("10.0.0.1", 4000, "srun")


def test_torchrun_inside_slurm_wins():
    assert detect({**SLURM, **TORCH, "TORCHELASTIC_RUN_ID": "1"}).world_size == 4
    assert detect({**SLURM, **TORCH}).rank == 1
    with pytest.raises(LaunchError, match="incomplete"):
        detect({**SLURM, "RANK": "0"})


def test_slurm_that_does_not_say_enough():
    environ = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    with pytest.raises(LaunchError, match="node list"):
        detect(environ)
    assert detect({**environ, "SLURM_NODELIST": "n7"}).master_addr == "n7"
    with pytest.raises(LaunchError, match="SLURM_PROCID=4 is out of range"):
        detect({**SLURM, "SLURM_PROCID": "4"})


@pytest.mark.parametrize("missing", ["SLURM_LOCALID", "SLURM_NTASKS"])
def test_slurm_variable_that_is_missing(missing):
    environ = {k: v for k, v in SLURM.items() if k not in (missing, "SLURM_STEP_NUM_TASKS")}
    with pytest.raises(LaunchError, match=missing):
        detect(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[03-07,9],x", "n03"),
        ("n[1,5],x", "n1"),
        ("gpu-a[1-2]-x", "gpu-a1-x"),
        ("rack[1-2]n[03-4],y", "rack1n03"),
        ("host.example.com", "host.example.com"),
        ("[10-12]", "10"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",x", "[]"])
def test_node_list_that_cannot_be_read(nodes):
    with pytest.raises(LaunchError, match="cannot be read"):
        first_host(nodes)


# Collectives


@contextmanager
def opened(timeout_s: float = 20.0):
    with open_runtime(detect(os.environ), "cpu", timeout_s) as runtime:
        yield runtime


def collectives(runtime: Runtime) -> dict:
    rank, world = runtime.rank, runtime.world_size
    found = {
        "sum": runtime.sum(torch.tensor([rank + 1.0, 1.0], dtype=torch.float64)).tolist(),
        "union": runtime.union(torch.tensor([1 << rank, 0], dtype=torch.uint8)).tolist(),
        "gather": runtime.gather({"rank": rank}),
        "first": runtime.gather_to_first(rank),
        "from": runtime.from_first(f"rank {rank}"),
        "equal": runtime.all_equal(7, "the number"),
    }
    late = runtime.max_async([rank, -rank])
    runtime.barrier()
    found["max"] = late()
    with runtime.together("nothing wrong"):
        pass
    if world > 1:
        with pytest.raises(LaunchError, match="the digest differs between ranks") as caught:
            runtime.all_equal("b" if rank == world - 1 else "a", "the digest", "copy it")
        found["odd"] = str(caught.value)
    return found


def expected(rank: int, world: int) -> dict:
    return {
        "sum": [world * (world + 1) / 2, float(world)],
        "union": [(1 << world) - 1, 0],
        "gather": [{"rank": other} for other in range(world)],
        "first": list(range(world)) if rank == 0 else [],
        "from": "rank 0",
        "equal": 7,
        "max": [world - 1, 0],
    }


def _all_collectives():
    with opened() as runtime:
        assert runtime.host
        return collectives(runtime)


def test_collectives_alone():
    with open_runtime(Launch(), "cpu") as runtime:
        assert not torch.distributed.is_initialized()
        assert collectives(runtime) == expected(0, 1)


@pytest.mark.parametrize("world", [2, 3])
def test_collectives(world):
    for rank, found in enumerate(run_ranks(world, _all_collectives, group=False, timeout_s=40)):
        assert "'b' on rank" in found.pop("odd")
        assert found == expected(rank, world)


def _errors_together():
    told = []
    with opened() as runtime:
        rank = runtime.rank
        for failing in ([1], [2, 1], [0, 1, 2]):
            start = time.monotonic()
            try:
                with runtime.together("reading"):
                    if rank in failing:
                        if rank == 2:
                            time.sleep(0.3)
                        raise DataError(f"row of rank {rank}", where="a.csv:3", hint="mend it")
            except DataError as error:
                told.append((error.message, error.where, error.hint, error.told_by, time.monotonic() - start < 5))
        try:
            with runtime.together("building"):
                if rank == 1:
                    raise ValueError("odd shape")
        except Exception as error:
            told.append((type(error).__name__, str(error), getattr(error, "told_by", None)))
        runtime.barrier()  # and the ranks are still in step
    return told


def test_together_raises_the_lowest_rank_s_error_everywhere():
    for rank, told in enumerate(run_ranks(3, _errors_together, group=False, timeout_s=40)):
        firsts = [1, 1, 0]
        assert told[:3] == [
            (f"row of rank {first}", "a.csv:3", "mend it", None if rank == first else first, True) for first in firsts
        ]
        own = ("ValueError", "odd shape", None)
        assert told[3] == (own if rank == 1 else ("HarnessError", "ValueError: odd shape", 1))


def test_together_alone_raises_the_error_itself():
    with pytest.raises(ZeroDivisionError), Runtime().together("dividing"):
        raise ZeroDivisionError


def _late_rank():
    """Rank 0 gives up after a second; rank 1 would wait for twenty, but must not."""
    start = time.monotonic()
    try:
        with opened(1.5 if os.environ["RANK"] == "0" else 20.0) as runtime:
            if runtime.rank == 1:
                time.sleep(4)
            runtime.barrier()
            return "met", 0.0
    except RuntimeError as error:
        return type(error).__name__, time.monotonic() - start


def test_different_time_limits_do_not_hang():
    results = run_ranks(2, _late_rank, group=False, timeout_s=15)
    assert all(kind != "met" for kind, _ in results)
    assert results[0][1] < 5
    assert results[1][1] < 9


def _counted_differently():
    """As on two nodes of which one took a restart and the other was asked to come along."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
    with open_runtime(detect(os.environ), "cpu", 10.0) as runtime:
        return runtime.gather(runtime.launch.restart)


def test_nodes_that_count_restarts_differently_meet():
    assert run_ranks(2, _counted_differently, group=False, timeout_s=30) == [[0, 1]] * 2


def _one_gang_after_the_other(port: int):
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    seen = []
    for restart in ("0", "1"):
        with open_runtime(detect({**os.environ, "TORCHELASTIC_RESTART_COUNT": restart}), "cpu", 10.0) as runtime:
            seen.append(runtime.store.check(["left"]))
            runtime.barrier()
            runtime.store.set("left", "by an earlier gang")
    return seen


def test_a_restarted_gang_does_not_read_what_is_left_in_the_launcher_s_store():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(2, _one_gang_after_the_other, store.port, group=False, timeout_s=30) == [[False] * 2] * 2


def _meet_nobody(rank: int, port: int):
    launch = Launch(rank=rank, local_rank=rank, world_size=2, master_addr="127.0.0.1", master_port=port)
    start = time.monotonic()
    try:
        with open_runtime(launch, "cpu", 1.0):
            return "met"
    except LaunchError as error:
        return str(error), time.monotonic() - start


@pytest.mark.parametrize("rank", [0, 1])
def test_peers_that_never_come(rank):
    process, receiver = start(_meet_nobody, (rank, free_port()))
    assert receiver.poll(20), "it waits for ever"
    kind, (message, seconds) = receiver.recv()
    process.join(5)
    assert kind == "value"
    assert f"rank {rank} of 2 could not meet its peers at 127.0.0.1:" in message
    assert "check that all nodes were started" in message
    assert seconds < 10
