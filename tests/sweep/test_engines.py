"""Trials that run elsewhere than on this machine's own cores."""

from __future__ import annotations

import pytest

from tests.end_to_end.experiment import write_images
from tests.end_to_end.processes import started
from tests.engines import slurm_cluster
from tests.sweep.sweeping import table
from tests.sweep.test_kills import SWEEP_S, make


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trials_are_jobs_of_slurm(tmp_path):
    """Two at once, of one rank and of two, which this machine's cores would not hold."""
    if absent := slurm_cluster.missing():
        pytest.skip(f"no Slurm cluster without {', '.join(absent)} (Debian: apt-get install slurmctld slurmd munge)")
    space = [{"launch.nproc": 1}, {"launch.nproc": 2}]
    command = make(tmp_path / "sweep", write_images(tmp_path / "data"), space)
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
        said = sweep.text()
    assert [trial["state"] for trial in table(tmp_path / "sweep")] == ["finished", "finished"]
    assert said.index("trial 0001 starts") < said.index("trial 0000 finished")
    logs = [(tmp_path / "sweep" / "tried" / "trials" / f"{number:04d}.log").read_text() for number in range(2)]
    assert all("is handed to Slurm" in log for log in logs)
