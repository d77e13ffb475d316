"""The launch environment is read without guessing: torch's variables, Slurm's, or none."""

from __future__ import annotations

import pytest

from harness.distributed.launch_env import FIXED_MACHINES, Launch, detect, first_host
from harness.errors import LaunchError

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


def test_no_variables_is_one_process():
    assert detect({}) == detect({"PATH": "/bin"}, local_rank=0) == Launch()
    assert Launch(call=1).alone, "also in a later call of the Python API"


def test_torch_variables():
    launch = detect({**TORCH, "LOCAL_WORLD_SIZE": "2"})
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (1, 1, 4, 2)
    assert (launch.master_addr, launch.master_port, launch.elastic, launch.restart) == ("h", 29500, False, 0)
    assert detect(TORCH).local_world_size == 4


def test_torchrun_is_recognized():
    launch = detect({**TORCH, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert launch.elastic
    assert launch.may_grow
    assert not detect({**TORCH, "TORCHELASTIC_RUN_ID": "none", FIXED_MACHINES: "1"}).may_grow
    assert launch.restart == 2
    assert "torch" in launch.by


@pytest.mark.parametrize(
    ("counts", "node", "expected"),
    [("2(x2)", "1", 2), ("4,3", "0", 4), ("4,3", "1", 3), ("4(x2),3", "2", 3), ("5", "0", 5)],
)
def test_each_node_of_slurm_has_its_own_number_of_tasks(counts, node, expected):
    environ = SLURM | {"SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": node}
    assert detect(environ).local_world_size == expected


@pytest.mark.parametrize("missing", TORCH)
def test_incomplete_set_is_reported_with_the_missing_names(missing):
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
        ("RANK", "one", "RANK='one' is not a whole number"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0 is out of range: 1 or more"),
        ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE=5 is out of range: from 1 to 4"),
        ("LOCAL_WORLD_SIZE", "1", "LOCAL_RANK=1 is out of range"),
        ("MASTER_PORT", "70000", "out of range"),
        ("TORCHELASTIC_RESTART_COUNT", "x", "not a whole number"),
    ],
)
def test_numbers_are_checked(name, value, message):
    with pytest.raises(LaunchError, match=message) as error:
        detect({**TORCH, name: value})
    assert "-m harness.train -c CONFIG" in error.value.hint, "also without a clone"


def test_slurm_step():
    launch = detect(SLURM)
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (3, 1, 4, 2)
    assert launch.master_addr == "gpu03"
    assert launch.by == "srun"
    others = [detect({**SLURM, "SLURM_PROCID": str(rank)}) for rank in range(4)]
    assert len({(other.master_addr, other.master_port) for other in others}) == 1
    assert 1024 < launch.master_port < 32768
    assert detect({**SLURM, "SLURM_JOB_ID": "123457"}).master_port != launch.master_port


def test_slurm_batch_script_without_srun_is_one_process():
    environ = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert detect({**environ, "SLURM_PROCID": "0"}) == Launch()


def test_slurm_with_its_own_master():
    launch = detect({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (launch.master_addr, launch.master_port, launch.by) == ("10.0.0.1", 4000, "srun")


def test_torchrun_inside_slurm_wins():
    assert detect({**SLURM, **TORCH, "TORCHELASTIC_RUN_ID": "1"}).world_size == 4
    assert detect({**SLURM, **TORCH}).rank == 1
    with pytest.raises(LaunchError, match="incomplete"):
        detect({**SLURM, "RANK": "0"})


def test_incomplete_slurm_environment():
    environ = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    with pytest.raises(LaunchError, match="node list"):
        detect(environ)
    assert detect({**environ, "SLURM_NODELIST": "n7"}).master_addr == "n7"
    with pytest.raises(LaunchError, match="SLURM_PROCID=4 is out of range"):
        detect({**SLURM, "SLURM_PROCID": "4"})


@pytest.mark.parametrize("missing", ["SLURM_LOCALID", "SLURM_NTASKS"])
def test_missing_slurm_variable(missing):
    environ = {k: v for k, v in SLURM.items() if k not in (missing, "SLURM_STEP_NUM_TASKS")}
    with pytest.raises(LaunchError, match=missing):
        detect(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[03-07,9],x", "n03"),
        ("gpu-a[1-2]-x", "gpu-a1-x"),
        ("rack[1-2]n[03-4],y", "rack1n03"),
        ("[10-12]", "10"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",x", "[]"])
def test_unreadable_node_list(nodes):
    with pytest.raises(LaunchError, match="cannot be read"):
        first_host(nodes)
