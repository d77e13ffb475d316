"""What engine slurm makes of a configuration, and of what Slurm says: all without Slurm."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from harness.cli import main
from harness.distributed.monitor import EngineReport
from harness.engines import launch
from harness.engines.slurm import engine, sbatch
from harness.engines.slurm.job_output import JobOutput
from harness.engines.slurm.scontrol import JobState, NoAnswer, parse
from harness.errors import ConfigError, LaunchError
from tests.conftest import ROOT
from tests.end_to_end.experiment import write_config

GOLDEN = ROOT / "tests" / "engines" / "golden"


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Jobs of a configuration in the working folder, by the words of the command line."""
    write_config(tmp_path, tmp_path / "data", output="runs", data={"cache_dir": None})
    shutil.copy(ROOT / "driver.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return lambda *words: launch.plan("config.yaml", ["launch.engine=slurm", *words])


EVERYTHING = [
    "launch.nnodes=2", "launch.nproc=4", "launch.threads=3", "launch.max_restarts=2", "launch.interface=ib0",
    "launch.python=/opt/conda/bin/python", "launch.env={NOTE: it's here}", "launch.slurm.partition=gpu",
    "launch.slurm.account=physics", "launch.slurm.qos=high", "launch.slurm.constraint=a100|h100",
    "launch.slurm.time=1-12:00:00", "launch.slurm.gpus_per_node=4", "launch.slurm.mem=64G",
    "launch.slurm.signal_s=300", "launch.slurm.output=logs/%x-%j.txt", "launch.slurm.extra=[--exclusive, --nice=5]",
    "launch.slurm.setup=[module load cuda, source ~/env.sh]", "data.num_workers=2",
]  # fmt: skip


@pytest.mark.parametrize(("golden", "words"), [("plain", []), ("everything", EVERYTHING)])
def test_the_whole_script(planned, golden, words):
    text = engine.render(planned(*words)).replace(sys.executable, "PYTHON")
    assert text == (GOLDEN / f"slurm_{golden}.txt").read_text()
    assert_shell(text)


def test_the_whole_array(planned):
    words = ["launch.slurm.requeue=false", "launch.slurm.time=0-00:02:00", "launch.slurm.setup=[date +%j]"]
    jobs = [planned(f"name=trial-{n}", f"optimizer.lr=0.{n}", *words) for n in (1, 2)]
    text = sbatch.array_script(jobs, "sweep", at_once=1).replace(sys.executable, "PYTHON")
    assert text == (GOLDEN / "slurm_array.txt").read_text()
    assert_shell(text)


def test_dry_run_prints_it(planned, capsys):
    words = ["--engine", "slurm", "--nnodes", "2", "--nproc", "4", "--dry-run"]
    assert main(["launch", "-c", "config.yaml", *words]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n" in text
    assert_shell(text)


def assert_shell(text: str) -> None:
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm_sweep.sbatch"])
def test_what_a_person_copies_is_the_engines(name):
    """The lines below its settings are those of the engine, and its settings name each of them."""
    text = (ROOT / "launch" / name).read_text()
    head, _, body = text.partition("# From here on there is nothing to edit.\n\n")
    assert body == sbatch.BODY
    assert_shell(text)
    for setting in ("rank=(", "folder=", "max_restarts=", "export OMP_NUM_THREADS="):
        assert f"\n{setting}" in head, setting
    for option in ("nodes", "ntasks-per-node", "cpus-per-task", "time", "signal", "requeue", "open-mode", "output"):
        assert f"\n#SBATCH --{option}" in head, option


def test_trials_of_the_copied_array_are_experiments():
    """Each line of its list is what driver.py understands, and there are as many as tasks."""
    text = (ROOT / "launch" / "slurm_sweep.sbatch").read_text()
    trials = re.findall(r'^    "(.+)"$', text, re.M)
    first, last = map(int, re.search(r"--array=(\d+)-(\d+)", text).groups())
    assert (first, last) == (0, len(trials) - 1)
    for words in trials:
        launch.plan(str(ROOT / "configs" / "digits.yaml"), words.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch.min_nodes=1"], "launch.min_nodes=1 has no meaning for engine slurm"),
        (["launch.rendezvous=a:1"], "has no meaning for engine slurm"),
        (["launch.node_rank=0"], "has no meaning for engine slurm"),
        (["launch.slurm.time='2'"], "signal_s=120 must be less than the time limit, 2 \\(120 s\\)"),
        (["launch.slurm.requeue=false", "launch.max_restarts=1"], "contradict each other"),
    ],
)
def test_settings_that_cannot_be(planned, words, message):
    for call in (engine.render, engine.start):
        with pytest.raises(LaunchError, match=message):
            call(planned(*words))


@pytest.mark.parametrize(
    "word", ["partition=a b", "time=tomorrow", "time=12:00:00", "mem=lots", "extra=[exclusive]", "signal_s=0"]
)
def test_settings_that_no_script_should_hold(planned, word):
    with pytest.raises(ConfigError, match=f"launch.slurm.{word.partition('=')[0]}"):
        planned(f"launch.slurm.{word}")


def test_tasks_of_an_array_ask_for_the_same(planned):
    with pytest.raises(LaunchError, match="a and b differ in launch"):
        sbatch.array_script([planned("name=a"), planned("name=b", "launch.nproc=2")], "sweep")


def test_a_file_in_a_folder_that_is_not_there(planned, tmp_path):
    with pytest.raises(LaunchError, match="the folder does not exist") as caught:
        engine.start(planned("launch.slurm.output=logs/%j.txt"))
    assert caught.value.hint == "mkdir -p logs"


def test_a_file_that_an_earlier_job_may_have_written(planned):
    with pytest.raises(LaunchError, match="an earlier job's output in that file"):
        sbatch.script(planned("launch.slurm.output=run.txt"))


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("5", 300), ("5:30", 330), ("1:00:00", 3600), ("1-0", 86400), ("1-2:30", 95400), ("2-00:00:01", 172801)],
)
def test_time_limits(limit, seconds):
    assert sbatch.seconds(limit) == seconds


# What Slurm says


def test_state_of_a_job():
    line = (
        "JobId=7 ArrayJobId=7 JobName=a b JobState=PENDING Reason=BeginTime Dependency=(null) Requeue=1 Restarts=2 "
        "StartTime=2026-01-02T03:04:05 EndTime=Unknown NodeList=(null) StdErr=/x y/7.txt StdOut=/x y/7.txt"
    )
    assert parse(line) == JobState("PENDING", "BeginTime", "", 2, "/x y/7.txt", "2026-01-02T03:04:05")
    assert not parse(line).over
    assert parse("JobId=7 JobState=NODE_FAIL Reason=None NodeList=n[0-1]") == JobState("NODE_FAIL", "", "n[0-1]")
    assert parse("JobState=NODE_FAIL").over


SAID = """\
harness: job 7, start 1, on n[0-1]
srun: error: n1: task 3: Killed
harness: job 7, start 2, on n[0-1]
epoch 1: 61 of 61 rows used
srun: error: n1: tasks 2-3: Segmentation fault (core dumped)
srun: error: n0: tasks 0,3: Exited with exit code 70
srun: error: Node failure on n1
srun: error: n0: task 1: something new
slurmstepd-n0: error: *** STEP 7.0 ON n0 CANCELLED ***"""


def test_output_is_shown_as_it_comes_and_understood(tmp_path, capsys):
    path = tmp_path / "7.txt"
    output = JobOutput()
    assert not output.show()  # nobody knows yet where it is
    output.path = str(path)
    assert not output.show()
    for cut in (10, 100, 400, len(SAID)):
        path.write_bytes(SAID[:cut].encode())
        output.show(last=cut == len(SAID))
    assert capsys.readouterr().err == SAID + "\n"
    assert output.exits == {2: -11, 3: -11, 0: 70}
    assert next(iter(output.exits)) == 2
    assert output.lost == "Node failure on n1"
    assert not output.over


@pytest.mark.parametrize(("again", "over"), [("no", True), ("yes", False), ("no, Slurm was told not to", True)])
def test_whether_the_script_is_over(tmp_path, again, over):
    lines = ["harness: job 7, start 1, on n0", f"harness: job 7: exit code 70, another start: {again}"]
    (tmp_path / "7.txt").write_text("\n".join(lines))
    output = JobOutput()
    output.path = str(tmp_path / "7.txt")
    output.show(last=True)
    assert output.over == over


@pytest.mark.parametrize(
    ("lines", "lost"),
    [
        (["harness: job 7: exit code 137, another start: no"], "srun, which started the ranks, was killed by SIGKILL"),
        (["srun: error: n1: task 1: Killed", "harness: job 7: exit code 137, another start: no"], ""),
        (["srun: error: Node failure on n1", "harness: job 7: exit code 143, another start: no"], "Node failure on n1"),
        (["harness: job 7: exit code 137, another start: yes"], ""),
    ],
)
def test_srun_itself_may_die(tmp_path, lines, lost):
    (tmp_path / "7.txt").write_text("\n".join(["harness: job 7, start 1, on n0", *lines]))
    output = JobOutput()
    output.path = str(tmp_path / "7.txt")
    output.show(last=True)
    assert (output.lost or output.killed) == lost


def lost_by(run: engine.SlurmRun) -> str:
    return run.follow().exits[-1].message


def test_nobody_waits_for_a_node_that_does_not_answer(planned, monkeypatch):
    """Slurm keeps the job for minutes when all that there is to know is known."""
    Answers(monkeypatch, "RUNNING", "COMPLETING")
    monkeypatch.setattr(engine, "_LINGER_S", 0.05)
    monkeypatch.setattr(engine, "down", lambda nodes: "n1 (completing*)")
    run = engine.SlurmRun(planned(), "7")
    run._output.over, run._output.start = True, 1
    assert lost_by(run) == "nodes that Slurm has lost: n1 (completing*)"


class Answers:
    """slurmctld, as far as ``follow`` sees it: the states of a job in turn, or no answer."""

    def __init__(self, monkeypatch, *states: str | None) -> None:
        self._states, self.asked = list(states), 0
        monkeypatch.setattr(engine, "job_state", self.state)
        monkeypatch.setattr(engine, "down", lambda nodes: "")
        for name in ("_POLL_S", "_SOON_S", "_SELDOM_S"):
            monkeypatch.setattr(engine, name, 0.001)

    def state(self, number: str) -> JobState | None:
        self.asked += 1
        name = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        if name == "deaf":
            raise NoAnswer("Unable to contact slurm controller (connect failure)")
        name, _, restarts = (name or "").partition(" ")
        return JobState(name, restarts=int(restarts or 0)) if name else None


def test_a_controller_that_is_away_for_a_while(planned, monkeypatch):
    answers = Answers(monkeypatch, "PENDING", "deaf", "deaf", "RUNNING", "COMPLETED")
    assert engine.SlurmRun(planned(), "7").follow() == EngineReport()
    assert answers.asked == 5


def test_a_controller_that_is_away_for_ever(planned, monkeypatch):
    Answers(monkeypatch, "RUNNING", "deaf")
    monkeypatch.setattr(engine, "_NO_ANSWER_S", 0.05)
    assert lost_by(engine.SlurmRun(planned(), "7")).endswith("(connect failure); job 7 may still run")


@pytest.mark.parametrize("name", ["TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "CANCELLED"])
def test_jobs_that_slurm_ended(planned, monkeypatch, name):
    Answers(monkeypatch, "RUNNING", "COMPLETING", name)
    assert lost_by(engine.SlurmRun(planned(), "7")) == f"Slurm ended job 7: {name}"


@pytest.mark.parametrize(
    ("name", "lost"),
    [("FAILED", "srun, which started the ranks, was killed by SIGKILL"), ("TIMEOUT", "Slurm ended job 7: TIMEOUT")],
)
def test_what_slurm_says_of_a_job_goes_before_what_its_script_says_of_srun(planned, monkeypatch, tmp_path, name, lost):
    Answers(monkeypatch, "RUNNING", name)
    (tmp_path / "7.txt").write_text(
        "harness: job 7, start 1, on n0\nharness: job 7: exit code 137, another start: no\n"
    )
    run = engine.SlurmRun(planned(), "7")
    run._output.path = str(tmp_path / "7.txt")
    run._output.show()
    assert lost_by(run) == lost


def test_a_job_that_slurm_has_forgotten(planned, monkeypatch):
    Answers(monkeypatch, "RUNNING", None)
    assert engine.SlurmRun(planned(), "7").follow() == EngineReport()


def test_slurm_starts_it_again_where_its_script_would_not(planned, monkeypatch):
    """A lost node, which Slurm notices while the ranks' failure comes to the script."""
    answers = Answers(monkeypatch, "COMPLETING 1", "PENDING 1", "RUNNING 1", "COMPLETED 1")
    monkeypatch.setattr(engine, "_LINGER_S", 0.0)
    run = engine.SlurmRun(planned(), "7")
    run._output.over, run._output.start = True, 1
    assert run.follow() == EngineReport()
    assert answers.asked == 4


def test_stopping_asks_then_insists(planned, monkeypatch):
    """Asked: not to be started again, a checkpoint. Asked again, or after the grace period: ended."""
    said = []
    monkeypatch.setattr(engine, "_quietly", lambda *words: said.append(" ".join(words)))
    Answers(monkeypatch, *["RUNNING"] * 50, "CANCELLED")
    run = engine.SlurmRun(planned("launch.grace_s=0.01"), "7")
    run.stop()
    assert said == ["scontrol update JobId=7 Requeue=0", "scancel --state=PENDING 7", "scancel --signal=TERM 7"]
    assert run.follow() == EngineReport(stopped=True)
    assert "scancel 7" in said
    said.clear()
    run.stop()
    assert said == ["scancel --signal=KILL 7", "scancel 7"]
