"""How a resumed start ends: its length, its exit code, and torn checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from harness.audit.records import Checkpoint, StartRecord
from harness.audit.verdict import Finding
from harness.errors import plural

_TRACEBACK = "Traceback (most recent call last)"
_FAILURE = re.compile(r"error|exception|traceback|fail|cannot|could not|corrupt|abort|stopped|refus|invalid", re.I)
_LINE_OF_CODE = re.compile(r'File "(.+)", line (\d+)')
_SHOWN = 5  # lines of output


def complete(killed: StartRecord, undisturbed: StartRecord) -> list[Checkpoint]:
    """Return the checkpoints after training began of which the killed start wrote all files, under their last names."""
    wanted = {checkpoint.after: checkpoint for checkpoint in undisturbed.checkpoints}

    def is_complete(checkpoint: Checkpoint) -> bool:
        due = wanted.get(checkpoint.after, Checkpoint(checkpoint.after))
        if due.files.keys() & checkpoint.files.keys():
            return due.files.keys() <= checkpoint.files.keys()
        # Names differ by chance, such as those with the time, or since the start was killed before it renamed the file.
        return len(due.files) <= len(checkpoint.files) and due.renames <= checkpoint.renames

    return [checkpoint for checkpoint in killed.checkpoints if checkpoint.after and is_complete(checkpoint)]


def failed(start: StartRecord) -> bool:
    return bool(start.late or start.code or (start.code is None and not start.stopped and start.killed is None))


def length(undisturbed: StartRecord, resumed: StartRecord, offset: int, explained: int = 0) -> Finding | None:
    """Compare the number of steps, if both starts ended by themselves.

    ``explained``: the steps that another finding accounts for, which are no finding here. Example: 2 if the rows of two
    steps are trained again, -2 if they are left out.
    """
    extra = len(resumed.steps) - (len(undisturbed.steps) - offset)
    if not extra or extra == explained or (undisturbed.stopped and extra > 0) or resumed.stopped or failed(resumed):
        return None
    due, done = len(undisturbed.steps), offset + len(resumed.steps)
    if extra < 0 and (reason := _failure(undisturbed, resumed)):
        text = f"exit code 0 after step {done} of {due}, though it failed: {reason}"
        return Finding("exit-code", text, tuple(resumed.last_lines(_SHOWN)), (done,), place=_place(resumed))
    text = f"training ends after step {done}, the undisturbed start's after step {due}"
    evidence = (f"it goes on from step {offset} and takes {plural(len(resumed.steps), 'step')}, not {due - offset}",)
    return Finding("length", text, evidence, (done, due))


def exit_code(undisturbed: StartRecord, resumed: StartRecord) -> Finding | None:
    """Find an exit code that contradicts what the processes recorded."""
    exceptions = [process for process in resumed.processes if process.exception]
    if resumed.code == 0 and exceptions and not any(process.exception for process in undisturbed.processes):
        text = f"exit code 0, though rank {exceptions[0].rank} failed: {exceptions[0].exception}"
        ranks = tuple(process.rank for process in exceptions)
        return Finding("exit-code", text, ranks=ranks, place=_place(resumed))
    return None


def failure(undisturbed: StartRecord, resumed: StartRecord, offset: int) -> Finding | None:
    """Return the finding about a resumed start that fails."""
    if not failed(resumed):
        return None
    done, lines = len(resumed.steps), tuple(resumed.last_lines(_SHOWN))
    how = resumed.late or f"exit code {resumed.code}"
    if done and offset + done >= len(undisturbed.steps) and not undisturbed.code:
        text = f"all steps are trained, but it fails at the end: {how}"
        return Finding("exit-code", text, lines, place=_place(resumed))
    where = f"after step {offset + done}" if done else "before its first step"
    return Finding("other", f"the resumed start fails {where}: {how}", lines, place=_place(resumed))


def torn(
    killed: StartRecord, undisturbed: StartRecord, resumed: StartRecord, found: Sequence[Finding]
) -> Finding | None:
    """Return a finding if an incomplete checkpoint is the cause of ``found``: it was loaded, or breaks the resume."""
    place = killed.killed or {}
    whole = complete(killed, undisturbed)
    parts = [path for each in killed.checkpoints if each.after and each not in whole for path in each.files]
    broken = [*killed.torn, *parts]
    if place.get("place") not in ("write", "checkpoint", "operation") or not broken or not found:
        return None
    if undisturbed.of_harness:
        return None
    printed = "\n".join(resumed.last_lines(60))
    folders = {os.path.dirname(path) for path in broken} - {
        os.path.dirname(path) for each in whole for path in each.files
    }
    loaded = [path for path in resumed.loaded if path in broken or path in folders or os.path.dirname(path) in folders]
    mentioned = [path for path in broken if os.path.basename(path) in printed]
    if not loaded and not mentioned:
        return None
    path = min(loaded or mentioned, key=lambda path: path not in killed.torn)
    name = os.path.basename(path) if path not in folders else f"the folder {os.path.basename(path)}"
    lost = [each.after for each in whole if path in each.files]
    older = [each.after for each in whole if path not in each.files]
    if failed(resumed) and not resumed.steps:
        what = f"it fails on {name}, which the kill left incomplete"
    elif any(finding.code == "from-scratch" for finding in found):
        what = f"it starts from scratch after {name}, which the kill left incomplete"
    else:
        what = f"it goes on from {name}, which the kill left incomplete: {found[0].text}"
    evidence = []
    if lost:
        evidence.append(f"the checkpoint of step {lost[-1]} was overwritten in place, and is lost")
    if older:
        evidence.append(f"the checkpoint of step {older[-1]} was complete")
    return Finding("torn-checkpoint", what, (*evidence, *found[0].evidence), names=(path,))


def _failure(undisturbed: StartRecord, resumed: StartRecord) -> str:
    """Return the line that tells of a failure at the end of the output; empty if there is none."""
    if any(process.exception for process in resumed.processes):
        return str(next(process.exception for process in resumed.processes if process.exception))
    lines, usual = resumed.last_lines(30), undisturbed.last_lines(200)
    if any(_TRACEBACK in line for line in lines) and not any(_TRACEBACK in line for line in usual):
        return lines[-1].strip()
    return next((line.strip() for line in reversed(lines) if _FAILURE.search(line) and line not in usual), "")


def _place(start: StartRecord) -> str:
    """Return the last line of the script in a traceback that the start printed, as file:line."""
    found = [match for line in start.last_lines(60) if (match := _LINE_OF_CODE.search(line))]
    own = [match for match in found if not re.search(r"/(site|dist)-packages/|/lib/python3|<", match[1])]
    return f"{os.path.basename(own[-1][1])}:{own[-1][2]}" if own else ""
