"""Engine slurm on a real cluster of two nodes: Debian's munged, slurmctld and slurmd, on this machine."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from harness.cli import main
from harness.distributed.monitor import EngineReport
from harness.engines import launch
from harness.engines.slurm import engine
from harness.errors import LaunchError
from tests.conftest import ROOT
from tests.end_to_end.experiment import assert_same_run, run, write_config
from tests.end_to_end.processes import END_S, Started, started, wait_for_steps, wait_until
from tests.engines import slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MODELS = "tests.end_to_end.models"
EACH_STEP = {"log_every": 1}
START_S = 120


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if absent := slurm_cluster.missing():
        pytest.skip(f"no Slurm cluster without {', '.join(absent)} (Debian: apt-get install slurmctld slurmd munge)")
    with slurm_cluster.started(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, stripes):
    """The run folder of an unbroken run on two ranks, without an engine."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert run(write_config(folder, stripes, model=slow(folder, 0.0), train=EACH_STEP), 2) == [0, 0]
    return folder / "runs" / "run"


def slow(folder: Path, step_s: float):
    """A model that is slow until the file ``fast`` exists."""
    return {"name": f"{MODELS}.Slow", "args": {"step_s": step_s, "until": str(folder / "fast")}}


def configured(folder, data, step_s=1.0, model=None, parallel=None, **options):
    """A configuration for two nodes; ``options`` are those of launch.slurm."""
    options = {"cpus_per_task": 1, "output": f"{folder}/%j.txt"} | options
    section = {"engine": "slurm", "nnodes": 2, "slurm": options}
    more = {"parallel": parallel} if parallel else {}
    return write_config(folder, data, model=model or slow(folder, step_s), launch=section, train=EACH_STEP, **more)


def launched(cluster, config, *words):
    command = [sys.executable, "-m", "harness", "launch", "-c", config, *words]
    return started(command, config.parent / "terminal.txt", **cluster.environ)


def number_of(run_: Started) -> str:
    return wait_until(lambda: re.search(r"job (\d+)", run_.text()), START_S, "the job's number").group(1)


def ranks(run_: Started) -> list[int]:
    """Process ids of the ranks, by rank."""
    found = {}
    for pid, environ in run_.alive().items():
        if "SLURM_STEP_ID" in environ and b"driver.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found[int(environ["SLURM_PROCID"])] = pid
    return [found[rank] for rank in sorted(found)]


def test_slurm_accepts_the_scripts(cluster, tmp_path, stripes):
    job = launch.plan(str(configured(tmp_path, stripes, time="1:00:00", mem="100M", extra=["--nice=5"])), [])
    script = tmp_path / "job.sh"
    script.write_text(engine.render(job))
    cluster.ask("sbatch", "--test-only", str(script))
    for name in ("slurm.sbatch", "slurm_sweep.sbatch"):
        cluster.ask("sbatch", "--test-only", str(ROOT / "launch" / name))


def test_errors_of_slurm_are_reported(cluster, tmp_path, stripes, monkeypatch):
    """Slurm's own error message, with nothing left behind."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    job = launch.plan(str(configured(tmp_path, stripes)), ["launch.slurm.partition=gpu", "launch.nnodes=8"])
    with pytest.raises(LaunchError, match="sbatch refused the job: .*invalid partition"):
        engine.start(job)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="is not installed on this machine"):
        engine.start(job)


def test_exception_on_rank_1(cluster, tmp_path, stripes):
    model = {"name": f"{MODELS}.Raises", "args": {"rank": 1, "step": 11}}
    with launched(cluster, configured(tmp_path, stripes, model=model)) as run_:
        assert run_.wait(START_S) == 1, run_.text()
        assert not run_.alive()
    text = run_.text()
    assert re.search(r"at step 10: ArithmeticError: \S+models\.py:\d+: a layer went wrong, only here", text)
    assert re.search(r"  rank 0: lost contact on .* at step \d+; exit code 1 ", text), text
    assert set(json.loads((tmp_path / "runs" / "run" / "failure.json").read_text())["ranks"]) == {"0", "1"}


def test_killed_then_stopped_then_done(cluster, tmp_path, stripes, unbroken, monkeypatch):
    """SIGKILL of rank 1 gives one report in time and leaves no process. The same command resumes; Ctrl-C stops it with
    a checkpoint; launch/slurm.sbatch, edited by hand, resumes it and gives the weights of the unbroken run."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    config, folder = configured(tmp_path, stripes), tmp_path / "runs" / "run"
    with launched(cluster, config) as run_:
        wait_for_steps(folder, 1, START_S)
        killed = time.monotonic()
        run_.signal(signal.SIGKILL, ranks(run_)[1])
        assert run_.wait(END_S) == 70, run_.text()
        assert time.monotonic() - killed < END_S
        assert not run_.alive()
        assert re.search(r"failed: rank 1 .*at step \d+: Killed: the process received SIGKILL", run_.text()), (
            run_.text()
        )
    with launched(cluster, config) as run_:
        wait_for_steps(folder, 3, START_S)
        number = number_of(run_)
        with pytest.raises(LaunchError, match=f"job {number} is already training run in this run folder"):
            engine.submit(launch.plan(str(config), []))
        run_.signal(signal.SIGINT)
        assert run_.wait(END_S) == 75, run_.text()
        assert not run_.alive()
        assert "stopped early with a checkpoint" in run_.text().splitlines()[-1]
        assert cluster.job(number)["JobState"] == "FAILED"  # not to be started again
    (tmp_path / "fast").touch()
    script = (ROOT / "launch" / "slurm.sbatch").read_text()
    mine = {"config": str(config), "folder": str(folder), "python": shlex.quote(sys.executable),
            "#SBATCH --output": f"{tmp_path}/%j.txt"}  # fmt: skip
    for name, value in mine.items():
        script, count = re.subn(rf"^{name}=\S+", f"{name}={value}", script, flags=re.M)
        assert count == 1, name
    (tmp_path / "mine.sbatch").write_text(script)
    copied = cluster.ask("sbatch", "--parsable", str(tmp_path / "mine.sbatch")).strip()
    wait_until(lambda: cluster.job(copied)["JobState"] == "COMPLETED", START_S, f"the end of job {copied}")
    assert_same_run(unbroken, folder)


def test_preempted_and_out_of_time(cluster, tmp_path, stripes, unbroken):
    """A more urgent job takes the nodes (SIGTERM), then the time limit approaches (SIGUSR1): each time there is a
    checkpoint and a requeue of the same job."""
    config, folder = configured(tmp_path, stripes, step_s=2.0, time="60"), tmp_path / "runs" / "run"
    with launched(cluster, config) as run_:
        number = number_of(run_)
        wait_for_steps(folder, 1, START_S)
        cluster.ask("sbatch", "--partition=urgent", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=true")
        begins_again(cluster, run_, number, 2)
        assert "stopped early (SIGTERM)" in run_.text()
        wait_for_steps(folder, 6, START_S)
        # launch.slurm.signal_s is as much: it is told as soon as Slurm looks
        cluster.ask("scontrol", "update", f"JobId={number}", "TimeLimit=2")
        begins_again(cluster, run_, number, 3, minutes=60)
        assert "stopped early (SIGUSR1)" in run_.text()
        (tmp_path / "fast").touch()
        assert run_.wait(START_S) == 0, run_.text()
        assert not run_.alive()
    assert run_.text().count("resumed from") == 2
    assert "launcher: srun" in run_.text()
    last = run_.text().splitlines()[-1]
    assert re.fullmatch(r"done: .*/runs/run", last)
    assert_same_run(unbroken, folder)


def begins_again(cluster, run_: Started, number: str, count: int, minutes: int | None = None) -> None:
    """Wait for the job's start number ``count``; ``minutes``: a new time limit."""
    wait_until(lambda: "resumes at" in run_.text().rpartition(", start ")[2], START_S, "a requeued job")
    if minutes:
        cluster.ask("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")
    wait_until(lambda: f"job {number}, start {count}" in run_.text(), START_S, f"start {count}")


def test_lost_node(cluster, tmp_path, stripes, unbroken):
    """The report does not wait until Slurm notices. A job that may restart waits for a node and resumes."""
    config, folder = configured(tmp_path, stripes), tmp_path / "runs" / "run"
    cluster.reconfigure(SlurmdTimeout=300, KillWait=30)  # as they are if nobody changes them
    with launched(cluster, config) as run_:
        wait_for_steps(folder, 1, START_S)
        cluster.lose_node("n0")  # which has the job's script, too
        at = time.monotonic()
        assert run_.wait(END_S) == 70, run_.text()
        assert time.monotonic() - at < END_S
        assert not run_.alive()
    lost = r"Lost: 15 s after the first failure there was still no exit record of rank 0 \(on n0\)"
    assert re.search(rf"failed: rank 0 .*at step \d+: {lost}", run_.text()), run_.text()
    assert re.search(r"  rank 1: lost contact on .* exit code 70", run_.text()), run_.text()
    cluster.start_node("n0")
    # At once as a rule; where the node came back before the job had ended, Slurm asks it about the job once more.
    wait_until(lambda: set(cluster.states().values()) == {"idle"}, 180, "both nodes")
    cluster.reconfigure()
    with launched(cluster, config, "launch.max_restarts=1") as run_:
        wait_for_steps(folder, 3, START_S)
        cluster.lose_node("n1")
        (tmp_path / "fast").touch()
        wait_until(lambda: "is pending (Nodes required for job are DOWN" in run_.text(), 60, "Slurm's notice")
        number = number_of(run_)
        cluster.ask("scontrol", "hold", number)
        cluster.start_node("n1")
        # A node that comes back is told to end what it had, which is this job: not in the very moment that it begins.
        wait_until(lambda: cluster.states()["n1"] == "idle", 30, "the node")
        time.sleep(2)
        cluster.ask("scontrol", "release", number)
        assert run_.wait(START_S) == 0, run_.text()
        assert not run_.alive()
    assert_same_run(unbroken, folder)


def test_lost_node_is_not_replaced(cluster, tmp_path, stripes):
    """With --nnodes 1:2 the job starts again on the node that is left, with the bits of two."""
    same, folder = {"logical_ranks": 2}, tmp_path / "runs" / "run"
    (tmp_path / "whole").mkdir()
    config = write_config(tmp_path / "whole", stripes, model=slow(tmp_path, 0.0), parallel=same, train=EACH_STEP)
    assert run(config, 2) == [0, 0]
    config = configured(tmp_path, stripes, parallel=same)
    with launched(cluster, config, "--nnodes", "1:2", "--max-restarts", "1") as run_:
        wait_for_steps(folder, 3, START_S)
        cluster.lose_node("n1")
        (tmp_path / "fast").touch()
        assert run_.wait(START_S) == 0, run_.text()
        assert not run_.alive()
    assert re.search(r"start 1, on n\[0-1\]", run_.text()), run_.text()
    assert re.search(r"start 2, on n0\n", run_.text()), run_.text()
    cluster.start_node("n1")
    wait_until(lambda: set(cluster.states().values()) == {"idle"}, 180, "both nodes")
    assert_same_run(tmp_path / "whole" / "runs" / "run", folder)


def test_detached_job(cluster, tmp_path, stripes, monkeypatch, capsys):
    """--detach prints the job id without following the job."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    config = configured(tmp_path, stripes)
    assert main(["launch", "-c", str(config), "--detach", "launch.slurm.extra=[--hold]"]) == 0
    number = capsys.readouterr().out.strip()
    assert cluster.job(number)["JobState"] == "PENDING"
    run_ = engine.SlurmRun(launch.plan(str(config), []), number)
    run_.stop()
    assert run_.follow() == EngineReport(stopped=True)
    assert cluster.job(number)["JobState"] == "CANCELLED"
