"""Sweeps of real training: killed in all their parts and started again; trials that are jobs of Slurm."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.experiment import write_config
from tests.end_to_end.processes import END_S, START_S, Started, name_of, started, wait_for_steps, wait_until
from tests.engines import slurm_cluster
from tests.sweep.sweeping import table, trial_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SPACE = [{"launch.nproc": 2, "optimizer.lr": 0.05}, {"launch.nproc": 1, "optimizer.lr": 0.2}]
SWEEP_S = 180


def write_sweep(folder: Path, data: Path, space: list[dict[str, Any]]) -> list[str]:
    """Write a sweep over ``space`` into ``folder``; return the command that runs it."""
    sections = {
        "data": {"shard": "global"},
        "batch": {"global": 8},
        "train": {"epochs": 12, "log_every": 1},
        "checkpoint": {"every_steps": 3, "keep": 2},
    }
    write_config(folder, data, **sections)
    sweep = {"name": "tried", "output": str(folder), "base": "config.yaml", "space": space, "comparable": False}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    return [sys.executable, "-m", "harness", "sweep", "-c", str(folder / "sweep.yaml")]


def wait_for_training(folder: Path, number: int, num_lines: int) -> None:
    wait_for_steps(trial_folder(folder, number), num_lines, 2 * START_S)


def processes_of(sweep: Started, number: int, *, ranks: bool) -> list[int]:
    """The processes of a trial: its ranks, which its launcher forks, or the launcher."""
    found = []
    for pid in sweep.alive():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if f'name="{number:04d}"' in words and name_of(pid).startswith("rank") == ranks:
            found.append(pid)
    return sorted(found)


def test_sweep_killed_in_all_its_parts_ends_in_the_same_table(tmp_path, data):
    """A rank of the first trial, the launcher of the second and then the sweep itself are killed with SIGKILL."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a trial of two ranks needs two cores, and this machine has one")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with started(write_sweep(whole, data, SPACE), tmp_path / "whole.txt") as sweep:
        assert sweep.wait(SWEEP_S) == 0, sweep.text()
    command = write_sweep(broken, data, SPACE)
    with started(command, tmp_path / "first.txt") as sweep:
        wait_for_training(broken, 0, 5)
        sweep.signal(signal.SIGKILL, processes_of(sweep, 0, ranks=True)[0])
        wait_for_training(broken, 1, 5)
        sweep.signal(signal.SIGKILL, processes_of(sweep, 1, ranks=False)[0])
        wait_until(lambda: "trial 0001 resumes" in sweep.text(), 2 * START_S, "the second trial is started again")
        wait_for_training(broken, 1, 25)
        sweep.signal(signal.SIGKILL)
        assert sweep.wait(END_S) == -signal.SIGKILL
        wait_until(lambda: not sweep.alive(), END_S, "no process of the killed sweep is left")
        terminal = sweep.text()
    assert [trial["state"] for trial in table(broken)] == ["finished", "running"]
    assert terminal.count("it will be restarted") == 2, terminal
    with started(command, tmp_path / "second.txt") as sweep:
        assert sweep.wait(SWEEP_S) == 0, sweep.text()
        assert "1 finished" in sweep.text()
    assert table(broken) == table(whole)
    for trial in table(whole):
        weights = [folder / "tried" / trial["run"] / "weights.safetensors" for folder in (whole, broken)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        assert trial["value"] > 0.4


def test_trials_run_as_slurm_jobs(tmp_path, data):
    """Two trials at once, of one rank and of two, for which this machine has too few cores."""
    if absent := slurm_cluster.missing():
        pytest.skip(f"no Slurm cluster without {', '.join(absent)} (Debian: apt-get install slurmctld slurmd munge)")
    command = write_sweep(tmp_path / "sweep", data, [{"launch.nproc": 1}, {"launch.nproc": 2}])
    (tmp_path / "slurm").mkdir()
    with (
        slurm_cluster.started(tmp_path / "slurm") as cluster,
        started(
            [*command, "--engine", "slurm", "--parallel", "2", f"launch.slurm.output={tmp_path}/slurm-%j.out"],
            tmp_path / "terminal.txt",
            **cluster.environ,
        ) as sweep,
    ):
        assert sweep.wait(SWEEP_S) == 0, sweep.text()
        terminal = sweep.text()
    assert [trial["state"] for trial in table(tmp_path / "sweep")] == ["finished", "finished"]
    assert terminal.index("trial 0001 starts") < terminal.index("trial 0000 finished")
    logs = [trial_folder(tmp_path / "sweep", number).with_suffix(".log").read_text() for number in range(2)]
    assert all("submitted" in log for log in logs)
