"""A sweep of real training: killed in all its parts, and started again, it ends in the same table."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.experiment import write_config, write_images
from tests.end_to_end.processes import END_S, START_S, Started, started, wait_for_steps, wait_until
from tests.sweep.sweeping import table

SPACE = [{"launch.nproc": 2, "optimizer.lr": 0.05}, {"launch.nproc": 1, "optimizer.lr": 0.2}]
SWEEP_S = 180


def make(folder: Path, data: Path, space: list[dict[str, Any]]) -> list[str]:
    """The command of a sweep over ``space`` in ``folder``."""
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


def trains(folder: Path, number: int, num_lines: int) -> None:
    wait_for_steps(folder / "tried" / "trials" / f"{number:04d}", num_lines, 2 * START_S)


def parts(sweep: Started, number: int, script: str) -> list[int]:
    """Processes of a trial: its launcher (harness) or its ranks (driver.py)."""
    found = []
    for pid in sweep.alive():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if f'name="{number:04d}"' in words and any(word.endswith(script) for word in words):
            found.append(pid)
    return sorted(found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_in_all_its_parts(tmp_path):
    """A rank of the first trial, the launcher of the second, and then the sweep itself die of SIGKILL."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a trial of two ranks needs two cores, and there is one")
    data = write_images(tmp_path / "data")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with started(make(whole, data, SPACE), tmp_path / "whole.txt") as sweep:
        assert sweep.wait(SWEEP_S) == 0, sweep.text()
    command = make(broken, data, SPACE)
    with started(command, tmp_path / "first.txt") as sweep:
        trains(broken, 0, 5)
        sweep.signal(signal.SIGKILL, parts(sweep, 0, "driver.py")[0])
        trains(broken, 1, 5)
        sweep.signal(signal.SIGKILL, parts(sweep, 1, "harness")[0])
        wait_until(lambda: "trial 0001 goes on" in sweep.text(), 2 * START_S, "the second trial is started again")
        trains(broken, 1, 25)
        sweep.signal(signal.SIGKILL)
        assert sweep.wait(END_S) == -signal.SIGKILL
        wait_until(lambda: not sweep.alive(), END_S, "nothing is left of the killed sweep")
        said = sweep.text()
    assert [trial["state"] for trial in table(broken)] == ["finished", "running"]
    assert said.count("it will be started again") == 2, said
    with started(command, tmp_path / "second.txt") as sweep:
        assert sweep.wait(SWEEP_S) == 0, sweep.text()
        assert "1 finished" in sweep.text()
    assert table(broken) == table(whole)
    for trial in table(whole):
        weights = [folder / "tried" / trial["run"] / "weights.safetensors" for folder in (whole, broken)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        assert trial["value"] > 0.4
