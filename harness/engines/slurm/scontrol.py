"""What Slurm says of a job, by its own commands. Nothing here decides anything."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from harness.errors import LaunchError

_ANSWER_S = 30.0  # for slurmctld; its own clients give up after about this long

# States that no job leaves again; "COMPLETING" hides the one that follows.
_OVER = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
     "TIMEOUT"]
)  # fmt: skip


class NoAnswer(Exception):
    """slurmctld could not be reached, or would not say."""


@dataclass(frozen=True)
class JobState:
    name: str
    """PENDING, RUNNING, FAILED, …"""
    reason: str = ""
    """Why it waits."""
    nodes: str = ""
    restarts: int = 0
    output: str = ""
    """The file that it prints to."""
    begins: str = ""

    @property
    def over(self) -> bool:
        return self.name in _OVER


def job_state(number: str) -> JobState | None:
    """The state of a job; None when Slurm knows it no more. Raises NoAnswer."""
    try:
        text = ask("scontrol", "show", "job", "-o", number)
    except NoAnswer as error:
        if "Invalid job id" in str(error):
            return None
        raise
    return parse(text.splitlines()[0] if text else "")


def parse(line: str) -> JobState:
    """The state in one line of ``scontrol show job -o``."""

    def value(key: str) -> str:
        found = re.search(rf"(?:^| ){key}=(.*?)(?= \S+=| *$)", line)  # a path may hold blanks
        return "" if found is None or found.group(1) in ("(null)", "None") else found.group(1)

    return JobState(
        value("JobState"), value("Reason"), value("NodeList"), int(value("Restarts") or 0), value("StdOut"),
        value("StartTime"),
    )  # fmt: skip


def down(nodes: str) -> str:
    """Those of ``nodes`` that Slurm has lost, such as "n1 (down*)"; empty if none, or if it does not say."""
    try:
        lines = ask("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T").splitlines() if nodes else []
    except NoAnswer:
        return ""
    # A star means that the node does not answer, which Slurm notices some time before it calls the node down.
    lost = {name: state for name, _, state in (line.partition(" ") for line in lines)
            if state.endswith("*") or state.startswith(("down", "fail"))}  # fmt: skip
    return ", ".join(f"{name} ({state})" for name, state in sorted(lost.items()))


def ask(*command: str, stdin: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """What a Slurm command prints. ``environ``: in place of this process's. Raises NoAnswer with its complaint,
    LaunchError if there is no such command."""
    try:
        done = subprocess.run(
            command, input=stdin, env=environ, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except FileNotFoundError:
        raise LaunchError(
            f"this machine has no {command[0]}",
            hint="start it where Slurm's commands are, such as a login node; --dry-run prints the script",
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} did not answer within {_ANSWER_S:.0f} s") from None
    if done.returncode != 0:
        raise NoAnswer(done.stderr.strip() or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout
