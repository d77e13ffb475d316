"""What was redirected, counted by name, and the list that is printed at the end.

Processes that a script starts with ``multiprocessing`` add their counts through files in a folder of the first one.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path

_counts: Counter[str] = Counter()
_lock = threading.Lock()
_folder: Path | None = None


def called_by_torch(depth: int = 1) -> bool:
    """Whether the function ``depth`` calls above the one that asks was called from code of torch, or from ours."""
    caller = sys._getframe(depth + 1).f_globals.get("__name__", "")
    return isinstance(caller, str) and caller.startswith(("torch.", "harness.apex."))


def note(name: str) -> None:
    """Count one redirection of ``name``."""
    with _lock:
        _counts[name] += 1


def note_call(name: str) -> None:
    """Count one call of the function that asks, unless torch's own code made it on the way of another."""
    if not called_by_torch(depth=2):
        note(name)


def forget() -> None:
    """Start again from nothing."""
    with _lock:
        _counts.clear()


def report_at_exit(aloud: bool) -> None:
    """When this process ends (not by ``os._exit``), print the list on stderr if ``aloud``, after all that runs then."""
    folder, owner = Path(tempfile.mkdtemp(prefix="harness-apex-")), os.getpid()
    _share(folder)

    def report() -> None:
        if os.getpid() != owner:  # a child that was forked and ends with sys.exit
            return
        text = _summary([json.loads(path.read_text()) for path in folder.glob("*.json")])
        shutil.rmtree(folder, ignore_errors=True)
        if aloud:
            print(text, file=sys.stderr, flush=True)

    atexit.register(report)


def leave_at_exit(folder: str) -> None:
    """In a process that ``multiprocessing`` spawned: write the counts into ``folder`` when it ends."""
    _share(Path(folder))
    Finalize(None, _leave, exitpriority=-100)


def _share(folder: Path) -> None:
    """Have processes that ``multiprocessing`` forks from here write their counts into ``folder`` when they end."""
    global _folder
    _folder = folder
    # a forked process forgets the finalizers it came with, and then does what is registered here
    register_after_fork(_leave, lambda leave: Finalize(None, leave, exitpriority=-100))


def shared_folder() -> str | None:
    """Where processes of this script leave their counts."""
    return str(_folder) if _folder is not None else None


def _leave() -> None:
    if _counts and _folder is not None and _folder.is_dir():
        (_folder / f"{os.getpid()}.json").write_text(json.dumps(_counts))


def _summary(children: list[dict[str, int]]) -> str:
    total = Counter(_counts)
    for counts in children:
        total.update(counts)
    if not total:
        return "harness.apex --device cpu: nothing was redirected; the script did not ask for CUDA."
    where = f" (in this process and {len(children)} that it started)" if children else ""
    lines = [f"{number:10d}  {name}" for name, number in sorted(total.items(), key=lambda item: (-item[1], item[0]))]
    return "\n".join([f"harness.apex --device cpu: calls that went to the CPU instead of CUDA{where}:", *lines])


def _forget_in_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _counts.clear()


os.register_at_fork(after_in_child=_forget_in_fork)
