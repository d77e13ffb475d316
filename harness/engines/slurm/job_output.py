"""The file that a Slurm job prints to: shown as it grows, and what srun says in it of tasks that ended badly."""

from __future__ import annotations

import re
import signal
import sys
from contextlib import suppress

from harness.distributed.stack import signal_name

_START = re.compile(r"^harness: job \S+, start (\d+), ")  # harness.engines.slurm.sbatch has the script say so, and this
_OVER = re.compile(r"^harness: job \S+: exit code (\d+), another start: no")
_TASKS = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.+)$")
_NODE = re.compile(r"^srun: error: (Node failure on \S+)")
_SIGNALS = {signal.strsignal(number): -number for number in signal.valid_signals()} | {"Out Of Memory": -signal.SIGKILL}


class JobOutput:
    """``path`` is set when it is known; a file that is not there yet, or not on this machine, shows nothing."""

    def __init__(self) -> None:
        self.path = ""
        self.exits: dict[int, int] = {}
        """Exit code of each task of the newest start that did not end well, or minus the signal it died of; the first
        to end comes first."""
        self.lost = ""
        self.died = ""
        """What is to be said if nothing else is known: srun's own end."""
        self.start = 0
        """Which start of the job the newest is, from 1."""
        self.over = False
        """Its script has come to its end, and does not ask for another start."""
        self._offset, self._rest = 0, b""

    def show(self, last: bool = False) -> bool:
        """Print what is new, in whole lines, or all of it if it is the ``last`` time; say whether there was any."""
        fresh = b""
        with suppress(OSError), open(self.path, "rb") as file:
            file.seek(self._offset)
            fresh = file.read()
        self._offset += len(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        if last and self._rest:
            lines.append(self._rest)
        for line in lines:
            text = line.decode(errors="replace")
            print(text, file=sys.stderr)
            self._note(text)
        return bool(lines)

    def _note(self, line: str) -> None:
        if found := _START.match(line):
            self.exits, self.lost, self.died, self.over = {}, "", "", False
            self.start = int(found.group(1))
        elif found := _OVER.match(line):
            self.over = True
            if (number := int(found.group(1)) - 128) > 0 and not self.exits:
                self.died = f"srun, which started the ranks, died of {signal_name(number)}"
        elif found := _NODE.match(line):
            self.lost = found.group(1)
        elif (found := _TASKS.match(line)) and (code := _code(found.group(2))) is not None:
            for rank in _numbers(found.group(1)):
                self.exits.setdefault(rank, code)


def _code(said: str) -> int | None:
    """What srun says of a task, as Outcome.exits has it; None for words it is not known to use of an end."""
    if found := re.match(r"Exited with exit code (\d+)", said):
        return int(found.group(1))
    return _SIGNALS.get(said.partition(" (core")[0])


def _numbers(listed: str) -> list[int]:
    """``0,3-5`` is [0, 3, 4, 5]."""
    spans = [part.partition("-") for part in listed.split(",")]
    return [number for low, _, high in spans for number in range(int(low), int(high or low) + 1)]
