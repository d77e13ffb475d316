"""The state of jobs and nodes, from Slurm's own commands. Nothing here decides anything."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from harness.errors import LaunchError

_ANSWER_S = 30.0  # for slurmctld; its own clients give up after about this long

# Final states. "COMPLETING" is not one: it hides the state that follows.
_OVER = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
     "TIMEOUT"]
)  # fmt: skip


class SlurmUnavailable(Exception):
    """slurmctld could not be reached, or refused to answer."""


@dataclass(frozen=True)
class JobState:
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
    """The state of a job; None if Slurm no longer lists it. Raises SlurmUnavailable."""
    try:
        text = ask("scontrol", "show", "job", "-o", number)
    except SlurmUnavailable as error:
        if "Invalid job id" in str(error):
            return None
        raise
    return parse(text.splitlines()[0] if text else "")


def parse(line: str) -> JobState:
    """The state in one line of ``scontrol show job -o``."""

    def value(key: str) -> str:
        found = re.search(rf"(?:^| ){key}=(.*?)(?= \S+=| *$)", line)  # a path may contain blanks
        return "" if found is None or found.group(1) in ("(null)", "None") else found.group(1)

    return JobState(
        value("JobState"), value("Reason"), value("NodeList"), int(value("Restarts") or 0), value("StdOut"),
        value("StartTime"),
    )  # fmt: skip


def down(nodes: str) -> str:
    """The lost nodes among ``nodes``, such as "n1 (down*)"; empty if there are none or Slurm does not answer."""
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
            command, input=stdin, env=environ, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
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
