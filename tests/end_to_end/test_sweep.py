"""Sweeps of real training: killed in all their parts and started again; trials that are jobs of Slurm."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.campaign.start import descendants
from tests.end_to_end.experiment import write_config
from tests.end_to_end.processes import (
    END_S,
    START_S,
    environment_of,
    python,
    start_python,
    wait_for_steps,
    wait_until,
)
from tests.engines import slurm_cluster
from tests.ranks import wait_for
from tests.tools.sweep.sweeping import table, trial_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SPACE = {"launch.nproc": [2, 1]}
SWEEP_S = 180


def write_sweep(folder: Path, data: Path, space: dict[str, list[Any]], epochs: int = 8) -> list[str]:
    """Write a sweep over ``space`` into ``folder``; return Python's words that run it."""
    sections = {
        "data": {"shard": "global"},
        "batch": {"global": 8},
        "model": {"name": "tests.end_to_end.models.Slow", "args": {"step_s": 0.03}},
        "train": {"epochs": epochs, "log_every": 1},
        "checkpoint": {"every": 3, "keep": 2},
    }
    write_config(folder, data, **sections)
    sweep = {"name": "tried", "output": str(folder), "base": "config.yaml", "space": space, "comparable": False}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    return ["-m", "harness", "sweep", "-c", str(folder / "sweep.yaml")]


def wait_for_training(folder: Path, number: int, num_lines: int) -> None:
    wait_for_steps(trial_folder(folder, number), num_lines, 2 * START_S)


def test_sweep_killed_in_all_its_parts_ends_in_the_same_table(tmp_path, data):
    """A rank of the first trial, the launcher of the second and then the sweep itself are killed with SIGKILL."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a trial of two ranks needs two cores, and this machine has one")
    whole, broken, terminal = tmp_path / "whole", tmp_path / "broken", tmp_path / "terminal.txt"
    assert python(write_sweep(whole, data, SPACE), tmp_path / "whole.txt", timeout_s=SWEEP_S) == 0
    command = write_sweep(broken, data, SPACE)
    sweep = start_python(command, terminal)
    try:
        pid, left = sweep[0].pid, []
        wait_for_training(broken, 0, 5)
        os.kill(next(rank for rank in descendants(pid) if "RANK" in environment_of(rank)), signal.SIGKILL)
        wait_for_training(broken, 1, 5)
        os.kill(descendants(pid)[0], signal.SIGKILL)  # its first child: the launcher
        wait_until(lambda: "trial 0001 resumes" in terminal.read_text(), 2 * START_S, "the second trial starts again")
        wait_for_training(broken, 1, 25)
        left = descendants(pid)
    finally:
        sweep[0].kill()
        wait_for([sweep], END_S)
    assert left
    wait_until(lambda: not any(map(environment_of, left)), END_S, "no process of the killed sweep is left")
    assert [trial["state"] for trial in table(broken)] == ["finished", "running"]
    assert terminal.read_text().count("interrupted, will be restarted") == 2, terminal.read_text()
    assert python(command, tmp_path / "second.txt", timeout_s=SWEEP_S) == 0, (tmp_path / "second.txt").read_text()
    assert "1 finished" in (tmp_path / "second.txt").read_text()
    assert table(broken) == table(whole)
    for trial in table(whole):
        weights = [folder / "tried" / trial["run"] / "weights.safetensors" for folder in (whole, broken)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        assert trial["value"] > 0.4


def test_trials_run_as_slurm_jobs(tmp_path, data):
    """Two trials at once, of one rank and of two, for which this machine has too few cores."""
    if absent := slurm_cluster.missing():
        pytest.skip(f"no Slurm cluster without {', '.join(absent)} (Debian: apt-get install slurmctld slurmd munge)")
    command = write_sweep(tmp_path / "sweep", data, {"launch.nproc": [1, 2]}, epochs=1)
    (tmp_path / "slurm").mkdir()
    words = [*command, "launch.engine=slurm", "parallel=2", f"launch.slurm.output={tmp_path}/slurm-%j.out"]
    with slurm_cluster.started(tmp_path / "slurm") as cluster:
        code = python(words, tmp_path / "terminal.txt", timeout_s=SWEEP_S, **cluster.environ)
    terminal = (tmp_path / "terminal.txt").read_text()
    assert code == 0, terminal
    assert [trial["state"] for trial in table(tmp_path / "sweep")] == ["finished", "finished"]
    assert terminal.index("trial 0001 starts") < terminal.index("trial 0000 finished")
    logs = [trial_folder(tmp_path / "sweep", number).with_suffix(".log").read_text() for number in range(2)]
    assert all("submitted" in log for log in logs)
