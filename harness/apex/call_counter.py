"""Counts redirected calls and bridged names, by option of the runner and by name, and prints the lists at the end.

Processes that the script starts with ``multiprocessing`` write their counts to files in a directory that the first
process creates.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from typing import Any

from harness.apex.patches import around

ON_CPU, MODERNIZE = "--device cpu", "--modernize"
_HEADINGS = {
    ON_CPU: "calls that ran on the CPU instead of CUDA",
    MODERNIZE: "names and calls bridged, because newer libraries lack or reject them",
}
_NOTHING = {
    ON_CPU: "no calls were redirected; the script did not use CUDA.",
    MODERNIZE: "nothing was bridged; the script did not need it.",
}
_counts: dict[str, Counter[str]] = {option: Counter() for option in _HEADINGS}
_lock = threading.Lock()
_directory: Path | None = None


def calling_module(depth: int = 1) -> str:
    """Return the name of the module that called the function ``depth`` frames above the caller, or what is ``around``
    it or counts its calls."""
    frame: Any = sys._getframe(depth + 1)
    while frame.f_code in _WRAPPERS:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def is_called_by_torch(depth: int = 1) -> bool:
    """Return True if code of torch or of this package called the function ``depth`` frames above the caller."""
    return calling_module(depth + 1).startswith(("torch.", "harness.apex."))


def count(name: str, option: str = ON_CPU) -> None:
    """Count one redirection of ``name``, or one bridge with ``option=MODERNIZE``."""
    with _lock:
        _counts[option][name] += 1


def count_call(name: str) -> None:
    """Count a call of the calling function, unless torch made it while running another function."""
    if not is_called_by_torch(depth=2):
        count(name)


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with calls counted under ``name`` unless torch makes them while running another function."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        count_call(name)
        return function(*args, **kwargs)

    wrapper.__name__ = name.rpartition(".")[2]
    return wrapper


_WRAPPERS = {each.__code__ for each in (around(print, print), counted("", print))}  # the same for all that they wrap


def counts(option: str = ON_CPU) -> dict[str, int]:
    """Return the number of redirected calls, or of what ``option`` does, in this process, by name."""
    return dict(_counts[option])


def reset(option: str = ON_CPU) -> None:
    """Set the counts of ``option`` to zero."""
    with _lock:
        _counts[option].clear()


def print_at_exit(verbose: bool, options: Sequence[str]) -> None:
    """Collect the counts of child processes when this process exits and, if ``verbose``, print the lists to stderr.

    There is one list for each of ``options``. They are the last output, after other ``atexit`` functions. ``os._exit``
    skips them.
    """
    directory, owner = Path(tempfile.mkdtemp(prefix="harness-apex-")), os.getpid()
    _share(directory)

    def report() -> None:
        if os.getpid() != owner:  # a forked child that ends with sys.exit
            return
        children = [json.loads(path.read_text()) for path in directory.glob("*.json")]
        shutil.rmtree(directory, ignore_errors=True)
        if verbose:
            print(*[summary(children, option) for option in options], sep="\n", file=sys.stderr, flush=True)

    atexit.register(report)


def save_at_exit(directory: str) -> None:
    """Write the counts into ``directory`` when this process, started by ``multiprocessing``, exits."""
    _share(Path(directory))
    Finalize(None, _save, exitpriority=-100)


def shared_directory() -> str | None:
    """Return the directory to which processes of this script write their counts."""
    return str(_directory) if _directory is not None else None


def summary(children: Sequence[dict[str, dict[str, int]]] = (), option: str = ON_CPU) -> str:
    """Return the list that ``print_at_exit`` prints for ``option``, with the counts of ``children`` added."""
    total = Counter(_counts[option])
    for child in children:
        total.update(child.get(option, {}))
    if not total:
        return f"harness.apex {option}: {_NOTHING[option]}"
    where = f" (this process and {len(children)} that it started)" if children else ""
    lines = [f"{number:10d}  {name}" for name, number in sorted(total.items(), key=lambda item: (-item[1], item[0]))]
    return "\n".join([f"harness.apex {option}: {_HEADINGS[option]}{where}:", *lines])


def _share(directory: Path) -> None:
    """Have processes that ``multiprocessing`` forks from this one write their counts into ``directory``."""
    global _directory
    _directory = directory
    # multiprocessing drops inherited finalizers in a forked child and then runs these callbacks, which add them again
    register_after_fork(_save, lambda save: Finalize(None, save, exitpriority=-100))


def _save() -> None:
    if any(_counts.values()) and _directory is not None and _directory.is_dir():
        (_directory / f"{os.getpid()}.json").write_text(json.dumps(_counts))


def _start_over_in_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held the inherited one at the fork
    for each in _counts.values():
        each.clear()


os.register_at_fork(after_in_child=_start_over_in_fork)
