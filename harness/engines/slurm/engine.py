"""Engine slurm: a batch job that is submitted, followed through its restarts, and stopped.

sbatch.py writes the script, scontrol.py reads the job's state. This machine and the nodes must share a disk.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path

from harness.distributed.monitor import EngineReport
from harness.distributed.rank_exit import RankExit
from harness.engines.base import Job
from harness.engines.slurm.job_output import JobOutput
from harness.engines.slurm.sbatch import script, settings_of
from harness.engines.slurm.scontrol import JobState, SlurmUnavailable, ask, down, job_state
from harness.errors import EXIT_STOPPED, LaunchError
from harness.runs import layout
from harness.runs.exit_files import ExitFiles
from harness.runs.files import identity

_POLL_S = 0.5  # between two reads of the job's output
_SOON_S, _SELDOM_S = 1.0, 10.0  # between two requests to slurmctld, which serves a whole site
_NO_ANSWER_S = 600.0  # without an answer of slurmctld, until this engine stops following the job
_LINGER_S = 5.0  # for Slurm to close a job that has ended; with a node that does not answer it takes minutes
_PEERS_S = 15.0  # for the other ranks to end once one has failed; the watchdog ends a blocked one within 13 s


def render(job: Job) -> str:
    return script(job)


def start(job: Job) -> SlurmRun:
    return SlurmRun(job, submit(job))


def submit(job: Job) -> str:
    """Submit the run without following it; return the job id."""
    text = script(job)
    output = settings_of(job).output
    place = Path(output).parent
    if "%" not in str(place) and not place.is_dir():
        raise LaunchError(
            f"launch.slurm.output={output}: the folder does not exist, and Slurm would end the job "
            "without an error message",
            where=job.path,
            hint=f"mkdir -p {shlex.quote(str(place))}",
        )
    if running := _same_run(job):
        raise LaunchError(
            f"job {running} is already training {job.config.name} in this run folder",
            where=str(job.folder),
            hint=f"wait for it, end it with scancel {running}, or rename this run with name=NAME",
        )
    return _sbatch(text, f"--comment={_comment(job)}")


class SlurmRun:
    """A submitted job."""

    def __init__(self, job: Job, number: str) -> None:
        self._job, self._number = job, number
        self._num_stops = 0
        self._deadline = float("inf")  # when a job that was asked to stop is cancelled
        self._printed = ""  # the last line about its state
        self._gave_up = False  # on ranks that do not end although another has failed
        self._exit_files = ExitFiles(job.folder / layout.LOGS)
        self._seen_start, self._earlier_failure = 0, identity(job.folder / layout.FAILURE)
        self._output = JobOutput()

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
        print(f"submitted job {self._number}", file=sys.stderr)
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
        """True if a rank has failed in this start. Also checks failure.json: srun may be lost with the first node."""
        failure = identity(self._job.folder / layout.FAILURE)
        if self._output.start != self._seen_start:
            self._seen_start, self._earlier_failure = self._output.start, failure
        failed = any(code != EXIT_STOPPED for code in self._output.exits.values())
        return failed or failure is not None and failure != self._earlier_failure

    def _print(self, state: JobState) -> None:
        """Print why the job is pending, if it is."""
        again = f", resumes at {state.start_time}" if state.restarts and state.start_time[:1].isdigit() else ""
        why = f" ({state.reason.replace('_', ' ')})" if state.reason else ""
        line = f"job {self._number} is pending{why}{again}" if state.name == "PENDING" else ""
        if line and line != self._printed:
            print(line, file=sys.stderr)
        self._printed = line

    def _report(self, lost: str) -> EngineReport:
        exits = [RankExit.from_code(rank, code) for rank, code in self._output.exits.items()]
        return EngineReport([*exits, *([RankExit.lost(lost)] if lost else [])], self._num_stops > 0)

    def _lost(self, state: JobState | None, nodes: str) -> str:
        """The reason why some ranks left no record, if the job was not stopped on request."""
        known = self._exit_files.read()
        silent = [rank for rank in range(self._job.world_size) if rank not in known]
        if self._num_stops or not silent:
            return ""
        lost = self._output.lost
        if self._gave_up:
            places = _hosts(nodes)
            where = [f"{rank} (on {places[rank // self._job.settings.nproc]})" for rank in silent] if places else silent
            lost = (
                f"{_PEERS_S:.0f} s after the first failure there was still no exit record of "
                f"rank{'s' * (len(where) > 1)} {', '.join(map(str, where))}"
            )
        elif state is not None and state.over and state.name not in ("COMPLETED", "FAILED"):
            lost = lost or f"Slurm ended job {self._number}: {state.name}"
        lost = lost or self._output.killed
        if (state is None or state.name != "COMPLETED") and (gone := down(nodes)):
            lost = f"{lost}; " * bool(lost) + f"nodes that Slurm has lost: {gone}"
        return lost


def _sbatch(text: str, *options: str) -> str:
    """Submit a script; return the job id."""
    # Inside another job, such as an interactive one, sbatch would take over that job's settings.
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name.endswith("_CONF")
    }
    try:
        return ask("sbatch", "--parsable", *options, stdin=text, environ=environ).strip().partition(";")[0]
    except SlurmUnavailable as error:
        raise LaunchError(f"sbatch refused the job: {error}", hint="--dry-run prints the script") from None


def _hosts(nodes: str) -> list[str]:
    """The nodes of a list such as ``n[0-1]``."""
    with suppress(SlurmUnavailable):
        return ask("scontrol", "show", "hostnames", nodes).split() if nodes else []
    return []


def _same_run(job: Job) -> str:
    """The id of a job of this user that trains into the same run folder; empty if there is none."""
    with suppress(SlurmUnavailable):
        lines = ask("squeue", "--me", "--noheader", f"--name={job.config.name}", "--format=%i %k").splitlines()
        return next((number for number, _, comment in (line.partition(" ") for line in lines)
                     if comment == _comment(job)), "")  # fmt: skip
    return ""


def _comment(job: Job) -> str:
    """Identifies a job by its run folder, since trials of two sweeps have the same names."""
    return f"run folder {job.folder.resolve()}"


def _quietly(*command: str) -> None:
    with suppress(SlurmUnavailable, LaunchError):
        ask(*command)
