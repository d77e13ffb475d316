"""The output file of a Slurm job: shown as it grows, and read for the script's records and srun's reports on tasks."""

from __future__ import annotations

import json
import re
import signal
import sys
from contextlib import suppress

from harness.distributed.stack import signal_name

# What the script of harness.engines.slurm.sbatch writes before its records in the job's output. They are JSON:
# {"start": N}, and at the end {"last_exit_code": N} unless it has asked for another start.
RECORD = "harness-record: "
_TASKS = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.+)$")
_NODE = re.compile(r"^srun: error: (Node failure on \S+)")
_SIGNALS = {signal.strsignal(number): -number for number in signal.valid_signals()} | {"Out Of Memory": -signal.SIGKILL}


class JobOutput:
    """``path`` is set once it is known. A missing file, such as one on another machine, shows nothing."""

    def __init__(self) -> None:
        self.path = ""
        self.exits: dict[int, int] = {}
        """Exit codes, or minus signal numbers, of the newest start's failed tasks, in the order in which they ended."""
        self.lost = ""
        self.killed = ""
        """The report that srun itself was killed, for when nothing else explains the end."""
        self.start = 0
        """Number of the newest start, from 1."""
        self.over = False
        """The script has ended and does not ask for another start."""
        self._offset, self._rest = 0, b""

    def show(self, last: bool = False) -> bool:
        """Print the new whole lines, and with ``last`` also an unfinished one. True if there were any."""
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
            if text.startswith(RECORD):
                with suppress(ValueError):  # cut off in the middle
                    self._read(json.loads(text.removeprefix(RECORD)))
            else:
                print(text, file=sys.stderr)
                self._parse(text)
        return bool(lines)

    def _read(self, record: dict[str, int]) -> None:
        if "start" in record:
            self.exits, self.lost, self.killed, self.over = {}, "", "", False
            self.start = record["start"]
        else:
            self.over = True
            if (number := record["last_exit_code"] - 128) > 0 and not self.exits:
                self.killed = f"srun, which started the ranks, was killed by {signal_name(number)}"

    def _parse(self, line: str) -> None:
        """srun's own messages, which have no other form."""
        if found := _NODE.match(line):
            self.lost = found.group(1)
        elif (found := _TASKS.match(line)) and (code := _code(found.group(2))) is not None:
            for rank in _numbers(found.group(1)):
                self.exits.setdefault(rank, code)


def _code(text: str) -> int | None:
    """The exit code, or minus the signal number, in srun's report on a task; None for any other text."""
    if found := re.match(r"Exited with exit code (\d+)", text):
        return int(found.group(1))
    return _SIGNALS.get(text.partition(" (core")[0])


def _numbers(listed: str) -> list[int]:
    """``0,3-5`` is [0, 3, 4, 5]."""
    spans = [part.partition("-") for part in listed.split(",")]
    return [number for low, _, high in spans for number in range(int(low), int(high or low) + 1)]
