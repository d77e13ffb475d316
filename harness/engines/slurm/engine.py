"""Engine slurm: a batch job, submitted, followed through its restarts, and stopped.

The script is harness.engines.slurm.sbatch's; what Slurm says of a job is harness.engines.slurm.scontrol's. The disk is taken to be
shared between this machine and the nodes, as Slurm's users have it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from harness.distributed.monitor import Outcome
from harness.engines.base import Job
from harness.engines.slurm.job_output import JobOutput
from harness.engines.slurm.sbatch import array_script, script
from harness.engines.slurm.scontrol import JobState, NoAnswer, ask, down, job_state
from harness.errors import EXIT_STOPPED, LaunchError
from harness.runs import layout, rank_exit
from harness.runs.files import identity

_POLL_S = 0.5  # for news in the job's output
_SOON_S, _SELDOM_S = 1.0, 10.0  # between two questions to slurmctld, which serves a whole site
_DEAF_S = 600.0  # without an answer, until the job is given up on
_LINGER_S = 5.0  # for Slurm to close a job that has come to its end; while a node does not answer, it waits for minutes
_PEERS_S = (
    15.0  # for the other ranks to end once one has failed; harness.distributed.watchdog gives a blocked one 12 to 13
)


def render(job: Job) -> str:
    return script(job)


def start(job: Job) -> Slurm:
    return Slurm(job, submit(job))


def submit(job: Job) -> str:
    """Hand the run to Slurm and return the number of its job; nobody follows it."""
    text = script(job)
    place = Path(job.settings.slurm.output).parent
    if "%" not in str(place) and not place.is_dir():
        raise LaunchError(
            f"launch.slurm.output={job.settings.slurm.output}: there is no such folder, and Slurm would end the job "
            "without a word",
            where=job.path,
            hint=f"mkdir -p {place}",
        )
    if running := _same_run(job):
        raise LaunchError(
            f"job {running} trains {job.config.name} from this folder already, and two cannot write one run folder",
            where=str(job.folder),
            hint=f"scancel {running}, wait for it, or name this one with name=NAME",
        )
    return _sbatch(text, f"--comment={_comment(job)}")


def submit_array(jobs: Sequence[Job], name: str, at_once: int | None = None) -> list[str]:
    """Hand all ``jobs`` to Slurm as one job array, and return a number for each, which ``Slurm(job, number)`` follows.
    Raises LaunchError as ``array_script`` does."""
    number = _sbatch(array_script(jobs, name, at_once))
    return [f"{number}_{task}" for task in range(len(jobs))]


class Slurm:
    """A job that Slurm has been given."""

    def __init__(self, job: Job, number: str) -> None:
        self._job, self._number = job, number
        self._asked = 0
        self._deadline = float("inf")  # when a job that was asked to stop is ended
        self._told = ""  # the last that was shown of its state
        self._gave_up = False
        self._earlier = rank_exit.read(job.folder / layout.LOGS)
        self._seen, self._before = 0, identity(job.folder / layout.FAILURE)
        self._output = JobOutput()

    def stop(self) -> None:
        self._asked += 1
        if self._asked == 1:
            self._deadline = time.monotonic() + self._job.settings.grace_s
            _quietly("scontrol", "update", f"JobId={self._number}", "Requeue=0")  # its script would start it again
            _quietly("scancel", "--state=PENDING", self._number)
            _quietly("scancel", "--signal=TERM", self._number)
        else:
            _quietly("scancel", "--signal=KILL", self._number)
            _quietly("scancel", self._number)

    def follow(self) -> Outcome:
        print(f"job {self._number} is handed to Slurm", file=sys.stderr)
        state: JobState | None = JobState("PENDING")
        heard = asked_at = time.monotonic()
        pause, nodes, over_at, failed_at = 0.0, "", float("inf"), float("inf")
        while state is not None and not state.over:
            time.sleep(_POLL_S)
            now = time.monotonic()
            if self._output.show() or self._output.over or self._gave_up or self._asked:
                pause = min(pause, _SOON_S)
            failed_at = min(failed_at, now) if self._failed() else float("inf")
            if now < failed_at + _PEERS_S:
                self._gave_up = False
            elif not self._gave_up and not self._output.over:
                self._gave_up = True
                # srun waits for a node that is gone until Slurm believes it, for minutes; the script does without then.
                _quietly("scancel", "--batch", "--signal=USR2", self._number)
            over_at = min(over_at, now) if self._output.over or self._gave_up else float("inf")
            if now > over_at + _LINGER_S and state.restarts < self._output.start:
                break  # else Slurm, which lost a node, starts it again by itself
            if now > self._deadline:
                self._deadline = now + self._job.settings.grace_s
                _quietly("scancel", self._number)
            if now < asked_at + pause:
                continue
            asked_at, before = now, state.name
            try:
                state, heard = job_state(self._number), now
            except NoAnswer as error:
                if now > heard + _DEAF_S:
                    return Outcome(self._output.exits, f"{error}; job {self._number} may still run", bool(self._asked))
                continue
            if state is not None:
                nodes = state.nodes or nodes
                self._output.path = state.output
                self._tell(state)
                pause = _SOON_S if state.name != before else min(2 * max(pause, _SOON_S), _SELDOM_S)
        return self._outcome(state, nodes)

    def _failed(self) -> bool:
        """Whether a rank has failed in this start; the first node may be gone, and srun with it."""
        if self._output.start != self._seen:
            self._seen, self._before = self._output.start, identity(self._job.folder / layout.FAILURE)
        told = identity(self._job.folder / layout.FAILURE)
        failed = any(code != EXIT_STOPPED for code in self._output.exits.values())
        return failed or told is not None and told != self._before

    def _tell(self, state: JobState) -> None:
        """What there is to know while nothing trains."""
        again = f", to go on at {state.begins}" if state.restarts and state.begins[:1].isdigit() else ""
        why = f" ({state.reason.replace('_', ' ')})" if state.reason else ""
        said = f"job {self._number} waits{why}{again}" if state.name == "PENDING" else ""
        if said and said != self._told:
            print(said, file=sys.stderr)
        self._told = said

    def _outcome(self, state: JobState | None, nodes: str) -> Outcome:
        self._output.show(last=True)
        if self._gave_up and not self._output.over:
            _quietly("scancel", self._number)  # the node of its script is the one that is gone
        told = rank_exit.since(self._earlier, self._job.folder / layout.LOGS)
        silent = [rank for rank in range(self._job.world_size) if rank not in told]
        lost = self._output.lost
        if self._gave_up:
            places = _hosts(nodes)
            where = [f"{rank} (on {places[rank // self._job.settings.nproc]})" for rank in silent] if places else silent
            lost = f"no word of rank {', '.join(map(str, where))} {_PEERS_S:.0f} s after the first failure"
        elif state is not None and state.over and state.name not in ("COMPLETED", "FAILED"):
            lost = lost or f"Slurm ended job {self._number}: {state.name}"
        lost = lost or self._output.died
        if (state is None or state.name != "COMPLETED") and (gone := down(nodes)):
            lost = f"{lost}; " * bool(lost) + f"nodes that Slurm has lost: {gone}"
        return Outcome(self._output.exits, lost if silent and not self._asked else "", bool(self._asked))


def _sbatch(text: str, *options: str) -> str:
    """Submit a script; the number of its job."""
    # Within a job, such as an interactive one, the new job would take over the other's shape.
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name.endswith("_CONF")
    }
    try:
        return ask("sbatch", "--parsable", *options, stdin=text, environ=environ).strip().partition(";")[0]
    except NoAnswer as error:
        raise LaunchError(f"sbatch refused the job: {error}", hint="--dry-run prints what it was given") from None


def _hosts(nodes: str) -> list[str]:
    """The nodes that ``n[0-1]`` stands for."""
    with suppress(NoAnswer):
        return ask("scontrol", "show", "hostnames", nodes).split() if nodes else []
    return []


def _same_run(job: Job) -> str:
    """The number of a job of this user that trains into the same run folder; empty if there is none."""
    with suppress(NoAnswer):
        lines = ask("squeue", "--me", "--noheader", f"--name={job.config.name}", "--format=%i %k").splitlines()
        return next((number for number, _, comment in (line.partition(" ") for line in lines)
                     if comment == _comment(job)), "")  # fmt: skip
    return ""


def _comment(job: Job) -> str:
    """What a job is known by: trials of two sweeps have the same names."""
    return f"run folder {job.folder.resolve()}"


def _quietly(*command: str) -> None:
    with suppress(NoAnswer, LaunchError):
        ask(*command)
