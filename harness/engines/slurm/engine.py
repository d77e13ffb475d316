"""Engine slurm: a batch job that is submitted, followed through its restarts, and stopped.

This machine and the nodes must share a disk.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.distributed import signals
from harness.distributed.monitor import EngineReport, tell
from harness.distributed.rank_exit import RankExit
from harness.engines.base import Job
from harness.engines.slurm.settings import Settings
from harness.errors import EXIT_STOPPED, LaunchError
from harness.runs import layout
from harness.runs.exit_files import ExitFiles
from harness.runs.files import identity
from harness.runs.followed import FollowedFile

_POLL_S = 0.5  # between two reads of the job's output
_SOON_S, _SELDOM_S = 1.0, 10.0  # between two requests to slurmctld, which serves a whole site
_NO_ANSWER_S = 600.0  # without an answer of slurmctld, until this engine stops following the job
_LINGER_S = 5.0  # for Slurm to close a job that has ended; with a node that does not answer it takes minutes
_PEERS_S = 15.0  # for the other ranks to end once one has failed; the watchdog ends a blocked one within 13 s

_ANSWER_S = 30.0  # for slurmctld; its own clients give up after about this long

# Final states. "COMPLETING" is not one: it hides the state that follows.
_OVER = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
     "TIMEOUT"]
)  # fmt: skip
_TASKS = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.+)$")
_NODE = re.compile(r"^srun: error: (Node failure on \S+)")
_SIGNALS = {signal.strsignal(number): -number for number in signal.valid_signals()} | {"Out Of Memory": -signal.SIGKILL}

# What the script writes before its records in the job's output. They are JSON: {"start": N}, and at the end
# {"last_exit_code": N} unless it has asked for another start.
RECORD = "harness-record: "

# launch/slurm.sbatch ends with the same lines, and a test compares them.
_BODY = r"""# The ranks meet on the first node, at the address that Slurm uses for it, on a free port. It is below
# 32768, where Linux begins to give ports to outgoing connections, so that none takes it before rank 0 does.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
MASTER_PORT=$("${rank[0]}" -c '
import random, socket
for port in random.sample(range(20000, 32768), 100):
    try:
        socket.socket().bind(("", port))
    except OSError:  # in use
        continue
    print(port)
    break')
export MASTER_ADDR MASTER_PORT

newest() { cat "$folder/@LATEST@" 2>/dev/null; }
before=$(newest)
rm -f "$folder"/@RANK_EXITS@ # of an earlier start
start=$((${SLURM_RESTART_COUNT:-0} + 1))
echo "harness: job $SLURM_JOB_ID, start $start, on $SLURM_JOB_NODELIST"
echo "@RECORD@{\"start\": $start, \"nodes\": $SLURM_JOB_NUM_NODES}" # for harness launch, as at the end

# One rank per task. When one fails, the others exit by themselves, each with a report; --wait ends a rank that cannot.
# srun waits for a lost node until Slurm marks it as down, which takes minutes; harness launch ends srun with USR2.
srun --kill-on-bad-exit=0 --wait=20 "${tasks[@]:---cpus-per-task=$SLURM_CPUS_PER_TASK}" "${rank[@]}" &
trap 'kill -KILL $!' USR2
wait $!
code=$?

# Requeue after a stop (75) with a new checkpoint, and up to max_restarts times after a failure; never after an error
# in the configuration (2) or the data (65).
again=no
case $code in
    0 | 2 | 65) ;;
    75) [ "$(newest)" = "$before" ] || again=yes ;;
    *) [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_restarts" ] || again=yes ;;
esac
[ $again = no ] || scontrol requeue "$SLURM_JOB_ID" 2>/dev/null || again="no, scontrol requeue failed"
echo "harness: job $SLURM_JOB_ID: exit code $code, another start: $again"
[ "$again" = yes ] || echo "@RECORD@{\"last_exit_code\": $code}"
exit "$code"
"""
_RESUME = '[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || rank+=(checkpoint.resume=auto) # never: only for the first start'
BODY = _BODY.replace("@LATEST@", f"{layout.CHECKPOINTS}/{layout.LATEST}")
BODY = BODY.replace("@RANK_EXITS@", f"{layout.LOGS}/{layout.RANK_EXITS}").replace("@RECORD@", RECORD)


def start(job: Job) -> SlurmRun:
    return SlurmRun(job)


def submit(job: Job) -> str:
    """Submit the run without following it; return the job id."""
    text = render(job)
    output = settings_of(job).output
    folder = Path(output).parent
    if "%" not in str(folder) and not folder.is_dir():
        raise job.error(
            f"launch.slurm.output={output}: the folder does not exist, and Slurm would end the job "
            "without an error message",
            f"mkdir -p {shlex.quote(str(folder))}",
        )
    if running := _same_run(job):
        raise LaunchError(
            f"job {running} is already training {job.config.name} in this run folder",
            where=str(job.folder),
            hint=f"wait for it, end it with scancel {running}, or rename this run with name=NAME",
        )
    return _sbatch(text, f"--comment={_comment(job)}")


class SlurmRun:
    """A job, ``number`` if it has been submitted before."""

    def __init__(self, job: Job, number: str = "") -> None:
        self._job = job
        self._num_stops = 0
        self._deadline = float("inf")  # when a job that was asked to stop is cancelled
        self._printed = ""  # the last line about its state
        self._gave_up = False  # on ranks that do not end although another has failed
        self._exit_files = ExitFiles(job.folder)
        self._seen_start, self._earlier_failure = 0, identity(job.folder / layout.FAILURE)
        self._output = JobOutput()
        self._number = number or submit(job)  # last: all records that exist before it are of earlier starts

    def stop(self) -> None:
        self._num_stops += 1
        if self._num_stops == 1:
            self._deadline = time.monotonic() + self._job.settings.grace_s
            _quietly("scontrol", "update", f"JobId={self._number}", "Requeue=0")  # else its script would start it again
            _quietly("scancel", "--state=PENDING", self._number)
            _quietly("scancel", "--signal=TERM", self._number)
        else:
            _quietly("scancel", "--signal=KILL", self._number)
            _quietly("scancel", self._number)

    def follow(self) -> EngineReport:
        tell(f"submitted job {self._number}")
        state: JobState | None = JobState("PENDING")
        answered = requested = time.monotonic()
        pause, nodes, over_at, failed_at = 0.0, "", float("inf"), float("inf")
        while state is not None and not state.over:
            time.sleep(_POLL_S)
            now = time.monotonic()
            if self._output.show() or self._output.over or self._gave_up or self._num_stops:
                pause = min(pause, _SOON_S)
            failed_at = min(failed_at, now) if self._failed() else float("inf")
            if now < failed_at + _PEERS_S:
                self._gave_up = False
            elif not self._gave_up and not self._output.over:
                self._gave_up = True
                # srun would wait for minutes until Slurm marks the node as down; the script then ends srun.
                _quietly("scancel", "--batch", "--signal=USR2", self._number)
            over_at = min(over_at, now) if self._output.over or self._gave_up else float("inf")
            if now > over_at + _LINGER_S and state.restarts < self._output.start:
                break  # otherwise Slurm, which lost a node, is restarting the job by itself
            if now > self._deadline:
                self._deadline = now + self._job.settings.grace_s
                _quietly("scancel", self._number)
            if now < requested + pause:
                continue
            requested, before = now, state.name
            try:
                state, answered = job_state(self._number), now
            except SlurmUnavailable as error:
                if now > answered + _NO_ANSWER_S:
                    return self._report(f"{error}; job {self._number} may still be running")
                continue
            if state is not None:
                nodes = state.nodes or nodes
                self._output.path = state.output
                self._print(state)
                pause = _SOON_S if state.name != before else min(2 * max(pause, _SOON_S), _SELDOM_S)
        self._output.show(last=True)
        if self._gave_up and not self._output.over:
            _quietly("scancel", self._number)  # its script ran on the lost node
        return self._report(self._lost(state, nodes))

    def _failed(self) -> bool:
        """Return True if a rank has failed in this start. Also checks failure.json: srun may be lost with the first
        node."""
        failure = identity(self._job.folder / layout.FAILURE)
        if self._output.start != self._seen_start:
            self._seen_start, self._earlier_failure = self._output.start, failure
        failed = any(code != EXIT_STOPPED for code in self._output.exits.values())
        return failed or failure is not None and failure != self._earlier_failure

    def _print(self, state: JobState) -> None:
        """Print why the job is pending, if it is."""
        again = f", resumes at {state.start_time}" if state.restarts and state.start_time[:1].isdigit() else ""
        reason = f" ({state.reason.replace('_', ' ')})" if state.reason else ""
        line = f"job {self._number} is pending{reason}{again}" if state.name == "PENDING" else ""
        if line and line != self._printed:
            tell(line)
        self._printed = line

    def _report(self, lost: str) -> EngineReport:
        exits = [RankExit.from_code(rank, code) for rank, code in self._output.exits.items()]
        return EngineReport([*exits, *([RankExit.lost(lost)] if lost else [])], self._num_stops > 0)

    def _lost(self, state: JobState | None, nodes: str) -> str:
        """Return the reason why some ranks left no record, if the job was not stopped on request."""
        recorded = self._exit_files.read()
        num_nodes = self._output.num_nodes or self._job.settings.nnodes
        silent = [rank for rank in range(num_nodes * self._job.settings.nproc) if rank not in recorded]
        if self._num_stops or not silent:
            return ""
        lost = self._output.lost
        if self._gave_up:
            places = _hosts(nodes)
            where = [f"{rank} (on {places[rank // self._job.settings.nproc]})" for rank in silent] if places else silent
            which = f"{'ranks' if len(where) > 1 else 'rank'} {', '.join(map(str, where))}"
            lost = f"{_PEERS_S:.0f} s after the first failure there was still no exit record of {which}"
        elif state is not None and state.over and state.name not in ("COMPLETED", "FAILED"):
            lost = lost or f"Slurm ended job {self._number}: {state.name}"
        lost = lost or self._output.killed
        if (state is None or state.name != "COMPLETED") and (lost_nodes := down(nodes)):
            lost = "; ".join(filter(None, (lost, f"nodes that Slurm has lost: {lost_nodes}")))
        return lost


def _sbatch(text: str, *options: str) -> str:
    """Submit a script, and return the job id."""
    # Inside another job, such as an interactive one, sbatch would take over that job's settings.
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name.endswith("_CONF")
    }
    try:
        return ask("sbatch", "--parsable", *options, stdin=text, environ=environ).strip().partition(";")[0]
    except SlurmUnavailable as error:
        raise LaunchError(f"sbatch refused the job: {error}", hint="--dry-run prints the script") from None


def _hosts(nodes: str) -> list[str]:
    """Return the nodes of a list such as ``n[0-1]``."""
    with suppress(SlurmUnavailable):
        return ask("scontrol", "show", "hostnames", nodes).split() if nodes else []
    return []


def _same_run(job: Job) -> str:
    """Return the id of a job of this user that trains into the same run folder; empty if there is none."""
    with suppress(SlurmUnavailable):
        lines = ask("squeue", "--me", "--noheader", f"--name={job.config.name}", "--format=%i %k").splitlines()
        return next((number for number, _, comment in (line.partition(" ") for line in lines)
                     if comment == _comment(job)), "")  # fmt: skip
    return ""


def _comment(job: Job) -> str:
    """Return a comment that identifies the job by its run folder, since trials of two sweeps have the same names."""
    return f"run folder {job.folder.resolve()}"


def _quietly(*command: str) -> None:
    with suppress(SlurmUnavailable, LaunchError):
        ask(*command)


# The batch script


def settings_of(job: Job) -> Settings:
    settings: Settings = job.settings.engine_settings
    return settings


def render(job: Job) -> str:
    """Return the script for ``sbatch``. Raises LaunchError for settings that have no meaning for Slurm."""
    _check(job)
    settings, slurm = job.settings, settings_of(job)
    options = [f"job-name={job.config.name}", *_options(job)]
    blocks = [
        ["#!/usr/bin/env bash", *(f"#SBATCH --{option}" for option in options)],
        list(slurm.setup),
        [f"export {name}={shlex.quote(value)}" for name, value in job.environ().items()],
        [
            f"rank=({_command(job)})",
            *([_RESUME] if job.config.checkpoint.resume == "never" else []),
            f"folder={shlex.quote(str(job.folder))}",
            f"max_restarts={settings.max_restarts}",
            *_tasks(job),
        ],
    ]
    return "\n\n".join(["\n".join(block) for block in blocks if block] + [BODY])


def _command(job: Job) -> str:
    """Return the command of each rank, without the places of this machine where the job can find them otherwise. It
    runs in the working folder, with the environment of this process."""
    python, *words = job.command()
    path = Path(job.path)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        words[words.index("-c") + 1] = str(path.relative_to(Path.cwd()))
    return f"{_python(job, python)} {shlex.join(words)}"


def _python(job: Job, python: str) -> str:
    """Return the interpreter, quoted: that of the settings, of the activated environment, in the working folder, or its
    path."""
    active = os.environ.get("VIRTUAL_ENV")
    if job.settings.python:
        return shlex.quote(python)
    if active and Path(python).is_relative_to(active):
        inside = Path(python).relative_to(active)
        return f'"${{VIRTUAL_ENV:?is not set: activate the environment, or set launch.python}}/{inside}"'
    if Path(python).is_relative_to(Path.cwd()):
        return shlex.quote(str(Path(python).relative_to(Path.cwd())))
    return shlex.quote(python)


def _may_shrink(job: Job) -> bool:
    least = settings_of(job).min_nodes
    return least is not None and least < job.settings.nnodes


def _cpus(job: Job) -> int:
    """Return the CPU cores of a rank."""
    return settings_of(job).cpus_per_task or job.settings.threads + job.config.data.num_workers


def _tasks(job: Job) -> list[str]:
    """Return the line that distributes the ranks over as many nodes as there are."""
    if not _may_shrink(job):
        return []
    num = job.settings.nproc
    return [f"tasks=(--ntasks=$((SLURM_JOB_NUM_NODES * {num})) --ntasks-per-node={num} --cpus-per-task={_cpus(job)})"]


def _options(job: Job) -> list[str]:
    """Return the options of sbatch, without their dashes."""
    settings, slurm = job.settings, settings_of(job)
    # With ntasks-per-node, Slurm would choose the fewest nodes of a range. So the job has one large task on each node.
    shape: dict[str, object] = {
        "nodes": settings.nnodes,
        "ntasks-per-node": settings.nproc,
        "cpus-per-task": _cpus(job),
    }
    if _may_shrink(job):
        nodes = f"{slurm.min_nodes}-{settings.nnodes}"
        shape = {"nodes": nodes, "cpus-per-task": settings.nproc * _cpus(job)}
    values = {
        **shape,
        "gpus-per-node": slurm.gpus_per_node,
        "mem": slurm.mem,
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time,
        "signal": f"USR1@{slurm.signal_s}" if slurm.requeue else None,
        "output": slurm.output,
    }
    return [
        *(f"{name}={value}" for name, value in values.items() if value is not None),
        "open-mode=append",  # a requeued job continues its output file
        "requeue" if slurm.requeue else "no-requeue",
        *(option.removeprefix("--") for option in slurm.extra),
    ]


def _check(job: Job) -> None:
    """Raise LaunchError for settings that contradict each other."""
    slurm = settings_of(job)
    if not re.search(r"%\d*[jA]", slurm.output):
        raise job.error(
            f"launch.slurm.output={slurm.output}: that file would also receive the output of other jobs",
            "use %j, the job id, in the file name",
        )
    if slurm.requeue and slurm.time is not None and 0 < seconds(slurm.time) <= slurm.signal_s:
        raise job.error(
            f"launch.slurm.signal_s={slurm.signal_s} must be less than the time limit, {slurm.time} "
            f"({seconds(slurm.time)} s): the run would be stopped as soon as it starts",
            "raise launch.slurm.time, or lower launch.slurm.signal_s",
        )
    if not slurm.requeue and job.settings.max_restarts:
        raise job.error(
            f"launch.max_restarts={job.settings.max_restarts} and launch.slurm.requeue=false contradict each other",
            "remove one of them",
        )


def seconds(limit: str) -> int:
    """Return the seconds of a time limit: minutes, minutes:seconds, hours:minutes:seconds, or
    days-hours[:minutes[:seconds]]."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, secs = (parts + [0, 0])[:3]
    else:
        hours, minutes, secs = 0, *(parts + [0])[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs


# The job's output


class JobOutput:
    """The output file of a job: shown as it grows, and read for the script's records and srun's reports on tasks.
    ``path`` is set once it is known. A missing file, such as one on another machine, shows nothing."""

    def __init__(self) -> None:
        self.path = ""
        self.exits: dict[int, int] = {}
        """Exit codes, or minus signal numbers, of the newest start's failed tasks, in the order in which they ended."""
        self.lost = ""
        self.killed = ""
        """The report that srun itself was killed, for when nothing else explains the end."""
        self.start = 0
        """Number of the newest start, from 1."""
        self.num_nodes: int | None = None
        """Nodes of the newest start."""
        self.over = False
        """The script has ended and does not ask for another start."""
        self._followed: FollowedFile | None = None

    def show(self, last: bool = False) -> bool:
        """Print the new whole lines, and with ``last`` also an unfinished one. Return True if there were any."""
        if self._followed is None and self.path:
            self._followed = FollowedFile(Path(self.path))
        any_shown = False
        while self._followed and (lines := self._followed.read(last)):
            any_shown = True
            for text in (line.decode(errors="replace") for line in lines):
                if text.startswith(RECORD):
                    with suppress(ValueError, TypeError, KeyError):  # cut off in the middle, or by another program
                        self._read(json.loads(text.removeprefix(RECORD)))
                else:
                    tell(text)
                    self._parse(text)
        return any_shown

    def _read(self, record: dict[str, int]) -> None:
        """Take over what the script has recorded: a start, or the end."""
        if "start" in record:
            self.exits, self.lost, self.killed, self.over = {}, "", "", False
            self.start, self.num_nodes = record["start"], record["nodes"]
        else:
            number = record["last_exit_code"] - 128
            self.over = True
            if number > 0 and not self.exits:
                self.killed = f"srun, which started the ranks, was killed by {signals.signal_name(number)}"

    def _parse(self, line: str) -> None:
        """Read srun's own messages, which have no other form."""
        if match := _NODE.match(line):
            self.lost = match.group(1)
        elif (match := _TASKS.match(line)) and (code := _code(match.group(2))) is not None:
            for rank in _numbers(match.group(1)):
                self.exits.setdefault(rank, code)


def _code(text: str) -> int | None:
    """Return the exit code, or minus the signal number, in srun's report on a task; None for any other text."""
    if match := re.match(r"Exited with exit code (\d+)", text):
        return int(match.group(1))
    return _SIGNALS.get(text.partition(" (core")[0])


def _numbers(listed: str) -> list[int]:
    """Return the ranks that srun has ``listed``: "0,3-5" is [0, 3, 4, 5]."""
    spans = [part.partition("-") for part in listed.split(",")]
    return [number for low, _, high in spans for number in range(int(low), int(high or low) + 1)]


# Slurm's own commands


class SlurmUnavailable(Exception):
    """slurmctld could not be reached, or refused to answer."""


@dataclass(frozen=True)
class JobState:
    """What slurmctld says of a job."""

    name: str
    """PENDING, RUNNING, FAILED, …"""
    reason: str = ""
    """Why it is pending."""
    nodes: str = ""
    restarts: int = 0
    output: str = ""
    """Path of its output file."""
    start_time: str = ""

    @property
    def over(self) -> bool:
        return self.name in _OVER


def job_state(number: str) -> JobState | None:
    """Return the state of a job; None if Slurm no longer lists it. Raises SlurmUnavailable."""
    try:
        text = ask("scontrol", "show", "job", "-o", number)
    except SlurmUnavailable as error:
        if "Invalid job id" in str(error):
            return None
        raise
    return parse(text.splitlines()[0] if text else "")


def parse(line: str) -> JobState:
    """Return the state in one line of ``scontrol show job -o``."""

    def value(key: str) -> str:
        match = re.search(rf"(?:^| ){key}=(.*?)(?= \S+=| *$)", line)  # a path may contain blanks
        return "" if match is None or match.group(1) in ("(null)", "None") else match.group(1)

    return JobState(
        value("JobState"), value("Reason"), value("NodeList"), int(value("Restarts") or 0), value("StdOut"),
        value("StartTime"),
    )  # fmt: skip


def down(nodes: str) -> str:
    """Return the lost nodes among ``nodes``, such as "n1 (down*)"; empty if there are none or Slurm does not answer."""
    try:
        lines = ask("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T").splitlines() if nodes else []
    except SlurmUnavailable:
        return ""
    # A star means that the node does not answer. Slurm reports it as down only some time later.
    lost = {name: state for name, _, state in (line.partition(" ") for line in lines)
            if state.endswith("*") or state.startswith(("down", "fail"))}  # fmt: skip
    return ", ".join(f"{name} ({state})" for name, state in sorted(lost.items()))


def ask(*command: str, stdin: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Run a Slurm command and return its output. ``environ``: instead of this process's. Raises SlurmUnavailable
    with the command's error, and LaunchError if it is not installed."""
    try:
        done = subprocess.run(
            command, input=stdin, env=environ, capture_output=True, text=True, timeout=_ANSWER_S, check=False,
            start_new_session=True,  # a Ctrl-C must not end sbatch after Slurm has accepted the job
        )  # fmt: skip
    except FileNotFoundError:
        raise LaunchError(
            f"{command[0]} is not installed on this machine",
            hint="run it on a machine with Slurm's commands, such as a login node; --dry-run prints the script",
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(f"{command[0]} did not answer within {_ANSWER_S:.0f} s") from None
    if done.returncode != 0:
        raise SlurmUnavailable(done.stderr.strip() or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout
