"""Engine slurm without Slurm: its scripts, and how it reads the job's output and state."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys

import pytest

from harness.cli import main
from harness.distributed.monitor import EngineReport
from harness.distributed.rank_exit import Cause, RankExit
from harness.engines import launch
from harness.engines.slurm import engine
from harness.engines.slurm.engine import RECORD, JobOutput, JobState, SlurmUnavailable, parse
from harness.errors import ConfigError, LaunchError
from harness.runs import exit_files
from tests.conftest import ROOT
from tests.end_to_end.experiment import write_config

GOLDEN = ROOT / "tests" / "engines" / "golden"


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Jobs of a configuration in the working folder, by the words of the command line."""
    write_config(tmp_path, tmp_path / "data", output="runs", data={"cache_dir": None})
    shutil.copy(ROOT / "driver.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    return lambda *words: launch.plan("config.yaml", ["launch.engine=slurm", *words])


EVERYTHING = [
    "launch.nnodes=2", "launch.slurm.min_nodes=1",
    "launch.nproc=4", "launch.threads=3", "launch.max_restarts=2", "launch.interface=ib0",
    "launch.python=/opt/conda/bin/python", "launch.env={NOTE: it's here}", "launch.slurm.partition=gpu",
    "launch.slurm.account=physics", "launch.slurm.time=1-12:00:00", "launch.slurm.gpus_per_node=4",
    "launch.slurm.mem=64G", "launch.slurm.signal_s=300", "launch.slurm.output=logs/%x-%j.txt",
    "launch.slurm.extra=[--exclusive, --nice=5]",
    "launch.slurm.setup=[module load cuda, source ~/env.sh]", "data.num_workers=2",
]  # fmt: skip


@pytest.mark.parametrize(("golden", "words"), [("plain", []), ("everything", EVERYTHING)])
def test_script(planned, golden, words):
    text = engine.render(planned(*words)).replace(shlex.quote(sys.executable), "PYTHON")
    assert text == (GOLDEN / f"slurm_{golden}.txt").read_text()
    assert_shell(text)


def test_script_names_no_place_of_this_machine(planned, tmp_path, monkeypatch):
    """What the job finds by its environment or from its working folder."""

    def command(job) -> list[str]:
        (line,) = re.findall(r"^rank=\(.*\)$", engine.render(job), re.M)
        shown = 'printf "%s\\n" "${rank[@]}"'
        done = subprocess.run(["bash", "-uc", f"{line}\n{shown}"], capture_output=True, text=True, check=False)
        return done.stdout.splitlines() or [done.stderr]

    job = launch.plan(str(tmp_path / "config.yaml"), ["launch.engine=slurm"])
    assert command(job) == [sys.executable, "driver.py", "-c", "config.yaml", "launch.engine=slurm"]
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    assert command(job)[0] == ".venv/bin/python"
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / ".venv"))
    assert str(tmp_path) not in engine.render(job)
    assert command(job)[0] == sys.executable  # by the variable, which may differ on the node
    assert command(planned("launch.python=python3.12"))[0] == "python3.12"
    text = engine.render(job)
    monkeypatch.delenv("VIRTUAL_ENV")
    monkeypatch.setattr(engine, "render", lambda job: text)
    assert "VIRTUAL_ENV: is not set: activate the environment, or set launch.python" in command(job)[0]


@pytest.mark.parametrize(("restarts", "resume"), [("", "never"), ("0", "never"), ("1", "auto")])
def test_a_restart_resumes_a_run_that_was_started_from_scratch(planned, restarts, resume):
    text = engine.render(planned("checkpoint.resume=never"))
    begin = text.index("rank=(")
    lines = text[begin : text.index("folder=", begin)] + 'echo "${rank[@]}"'
    environ = {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    done = subprocess.run(["bash", "-euc", lines], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == f"checkpoint.resume={resume}"


def test_a_command_of_slurm_does_not_receive_ctrl_c():
    """The terminal sends it to all processes of a session's foreground group."""
    assert engine.ask(sys.executable, "-c", "import os; print(os.getsid(0) == os.getpid())") == "True\n"


def test_dry_run_prints_the_script(planned, capsys):
    words = ["--engine", "slurm", "--nnodes", "2", "--nproc", "4", "--dry-run"]
    assert main(["launch", "-c", "config.yaml", *words]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n" in text
    assert_shell(text)


def assert_shell(text: str) -> None:
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm_sweep.sbatch"])
def test_scripts_in_launch_are_current(name):
    """The lines below its settings are those of the engine, and its settings name each of them."""
    text = (ROOT / "launch" / name).read_text()
    head, _, body = text.partition("# Nothing to edit below this line.\n\n")
    assert body == engine.BODY
    assert_shell(text)
    for setting in ("rank=(", "folder=", "max_restarts=", "export OMP_NUM_THREADS="):
        assert f"\n{setting}" in head, setting
    for option in ("nodes", "ntasks-per-node", "cpus-per-task", "time", "signal", "requeue", "open-mode", "output"):
        assert f"\n#SBATCH --{option}" in head, option


def test_port_of_the_ranks_is_free_on_every_address(monkeypatch, capsys):
    """A port is in use, too, if a socket that does not listen has it, on another address than 127.0.0.1."""
    choose = re.search(r"^MASTER_PORT=.* -c '\n(.*?)'\)$", engine.BODY, re.M | re.S)[1]
    with socket.socket() as closed:
        closed.bind(("", 0))
        free, drawn_from = closed.getsockname()[1], []
    with socket.socket() as other:
        other.bind(("127.0.0.2", 0))
        taken = other.getsockname()[1]
        monkeypatch.setattr("random.sample", lambda ports, count: drawn_from.append(ports) or [taken, free])
        exec(choose, {})
    assert capsys.readouterr().out == f"{free}\n"
    assert drawn_from == [range(20_000, 32_768)]


def test_trials_of_the_array_in_launch_are_valid():
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
        (["launch.slurm.time='2'"], "signal_s=120 must be less than the time limit, 2 \\(120 s\\)"),
        (["launch.slurm.requeue=false", "launch.max_restarts=1"], "contradict each other"),
        (["launch.nnodes=2", "launch.slurm.min_nodes=3"], "min_nodes=3 is more than launch.nnodes=2"),
        (["launch.slurm.output=run.txt"], "that file would also receive the output of other jobs"),
    ],
)
def test_settings_that_cannot_work_are_refused(planned, words, message):
    for call in (engine.render, engine.start):
        with pytest.raises(LaunchError, match=message):
            call(planned(*words))


@pytest.mark.parametrize(
    "word", ["partition=a b", "time=tomorrow", "time=12:00:00", "mem=lots", "extra=[exclusive]", "signal_s=0"]
)
def test_malformed_settings_are_refused(planned, word):
    with pytest.raises(ConfigError, match=f"launch.slurm.{word.partition('=')[0]}"):
        planned(f"launch.slurm.{word}")


def test_missing_output_folder_is_reported(planned, tmp_path):
    with pytest.raises(LaunchError, match="the folder does not exist") as caught:
        engine.start(planned("launch.slurm.output=logs/%j.txt"))
    assert caught.value.hint == "mkdir -p logs"


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("5", 300), ("5:30", 330), ("1:00:00", 3600), ("1-0", 86400), ("1-2:30", 95400), ("2-00:00:01", 172801)],
)
def test_time_limits(limit, seconds):
    assert engine.seconds(limit) == seconds


# What Slurm says


def test_job_state_is_parsed():
    line = (
        "JobId=7 ArrayJobId=7 JobName=a b JobState=PENDING Reason=BeginTime Dependency=(null) Requeue=1 Restarts=2 "
        "StartTime=2026-01-02T03:04:05 EndTime=Unknown NodeList=(null) StdErr=/x y/7.txt StdOut=/x y/7.txt"
    )
    assert parse(line) == JobState("PENDING", "BeginTime", "", 2, "/x y/7.txt", "2026-01-02T03:04:05")
    assert not parse(line).over
    assert parse("JobId=7 JobState=NODE_FAIL Reason=None NodeList=n[0-1]") == JobState("NODE_FAIL", "", "n[0-1]")
    assert parse("JobState=NODE_FAIL").over


SAID = """\
any words about a start
harness-record: {"start": 1, "nodes": 2}
srun: error: n1: task 3: Killed
harness-record: {"start": 2, "nodes": 1}
epoch 1: 61 of 61 rows used
srun: error: n1: tasks 2-3: Segmentation fault (core dumped)
srun: error: n0: tasks 0,3: Exited with exit code 70
srun: error: Node failure on n1
srun: error: n0: task 1: something new
slurmstepd-n0: error: *** STEP 7.0 ON n0 CANCELLED ***"""


def test_records_of_another_form_are_ignored(tmp_path):
    output = JobOutput()
    output.path = str(tmp_path / "out")
    (tmp_path / "out").write_text("".join(f"{RECORD}{text}\n" for text in ("3", "null", "[]", "{}", '{"sta')))
    assert output.show()
    assert (output.over, output.start) == (False, 0)


def test_output_is_shown_while_it_grows_and_parsed(tmp_path, capsys):
    path = tmp_path / "7.txt"
    output = JobOutput()
    assert not output.show()  # nobody knows yet where it is
    output.path = str(path)
    assert not output.show()
    for cut in (10, 100, 400, len(SAID)):
        path.write_bytes(SAID[:cut].encode())
        output.show(last=cut == len(SAID))
    shown = "".join(line + "\n" for line in SAID.splitlines() if not line.startswith(RECORD))
    assert capsys.readouterr().err == shown
    assert output.start == 2
    assert output.exits == {2: -11, 3: -11, 0: 70}
    assert next(iter(output.exits)) == 2
    assert output.lost == "Node failure on n1"
    assert not output.over


PREFIX = ['harness-record: {"start": 1, "nodes": 2}']
END = 'harness-record: {{"last_exit_code": {}}}'
SRUN_KILLED = "srun, which started the ranks, was killed by SIGKILL"


@pytest.mark.parametrize(
    ("lines", "over", "lost"),
    [
        ([END.format(70)], True, ""),
        (["harness: job 7: exit code 70, another start: no"], False, ""),  # words for the reader, not a record
        ([END.format(137)], True, SRUN_KILLED),
        (["srun: error: n1: task 1: Killed", END.format(137)], True, ""),
        (["srun: error: Node failure on n1", END.format(143)], True, "Node failure on n1"),
        ([END.format(13)[:-1]], False, ""),  # the disk is full
    ],
)
def test_end_of_the_script_is_parsed(tmp_path, lines, over, lost):
    (tmp_path / "7.txt").write_text("\n".join([*PREFIX, *lines]))
    output = JobOutput()
    output.path = str(tmp_path / "7.txt")
    output.show(last=True)
    assert (output.over, output.lost or output.killed) == (over, lost)


# Following a job


class Controller:
    """Replaces slurmctld: returns the ``states`` of a job in turn, None for a forgotten job, "no answer" for none.

    A number after a state counts the job's restarts. ``output`` is the content of the job's output file.
    """

    def __init__(self, monkeypatch, tmp_path, *states: str | None, output: str = "", down: str = "") -> None:
        self._states, self.asked, self._output = list(states), 0, tmp_path / "7.txt"
        self._output.write_text(output)
        monkeypatch.setattr(engine, "job_state", self.state)
        monkeypatch.setattr(engine, "down", lambda nodes: down)
        for name in ("_POLL_S", "_SOON_S", "_SELDOM_S"):
            monkeypatch.setattr(engine, name, 0.001)
        for name in ("_LINGER_S", "_NO_ANSWER_S"):
            monkeypatch.setattr(engine, name, 0.05)

    def state(self, number: str) -> JobState | None:
        self.asked += 1
        name = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        if name == "no answer":
            raise SlurmUnavailable("Unable to contact slurm controller (connect failure)")
        name, _, restarts = (name or "").partition(" ")
        return JobState(name, restarts=int(restarts or 0), output=str(self._output)) if name else None


OVER = "\n".join([*PREFIX, END.format(70), ""])
KILLED = "\n".join([*PREFIX, END.format(137), ""])
# What the controller does, and the reported loss.
FOLLOWED = {
    "away for a while": (["PENDING", "no answer", "RUNNING", "COMPLETED"], {}, ""),
    "away": (["RUNNING", "no answer"], {}, "slurm controller (connect failure); job 7 may still be running"),
    "job forgotten": (["RUNNING", None], {}, ""),
    "job out of time": (["RUNNING", "COMPLETING", "TIMEOUT"], {}, "Slurm ended job 7: TIMEOUT"),
    "job out of memory": (["RUNNING", "OUT_OF_MEMORY"], {}, "Slurm ended job 7: OUT_OF_MEMORY"),
    "srun killed": (["RUNNING", "RUNNING", "FAILED"], {"output": KILLED}, SRUN_KILLED),
    "state goes before srun": (["RUNNING", "RUNNING", "TIMEOUT"], {"output": KILLED}, "Slurm ended job 7: TIMEOUT"),
    "node that does not answer": (["RUNNING", "COMPLETING"], {"output": OVER, "down": "n1 (completing*)"},
                                  "nodes that Slurm has lost: n1 (completing*)"),
    "restarted by Slurm": (["COMPLETING 1", "PENDING 1", "RUNNING 1", "COMPLETED 1"], {"output": OVER}, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLLOWED)
def test_job_is_followed_to_its_end(planned, monkeypatch, tmp_path, case):
    states, options, lost = FOLLOWED[case]
    controller = Controller(monkeypatch, tmp_path, *states, **options)
    report = engine.SlurmRun(planned(), "7").follow()
    assert bool(report.exits) == bool(lost)
    assert all(exit.cause is Cause.NODE_LOST and exit.message.endswith(lost) for exit in report.exits)
    assert controller.asked >= len(states)


def test_a_record_that_comes_right_after_the_submission_is_of_this_start(planned, monkeypatch):
    job = planned()
    record = RankExit.now(0, Cause.ERROR)

    def submit(job):
        (job.folder / "logs").mkdir(parents=True)
        exit_files.write(job.folder / "logs", record)
        return "7"

    monkeypatch.setattr(engine, "submit", submit)
    assert engine.start(job)._exit_files.read() == {0: record}


def test_stop_requests_a_checkpoint_and_then_cancels(planned, monkeypatch, tmp_path):
    """At first without a requeue; on the second call, or after the grace period, the job is cancelled."""
    sent = []
    monkeypatch.setattr(engine, "_quietly", lambda *words: sent.append(" ".join(words)))
    Controller(monkeypatch, tmp_path, *["RUNNING"] * 50, "CANCELLED")
    run = engine.SlurmRun(planned("launch.grace_s=0.01"), "7")
    run.stop()
    assert sent == ["scontrol update JobId=7 Requeue=0", "scancel --state=PENDING 7", "scancel --signal=TERM 7"]
    assert run.follow() == EngineReport(stopped=True)
    assert "scancel 7" in sent
    sent.clear()
    run.stop()
    assert sent == ["scancel --signal=KILL 7", "scancel 7"]
