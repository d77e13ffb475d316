"""Counts redirected calls and bridged names, by option of the runner and by name, and prints the lists at the end."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from harness.apex.patches import around

ON_CPU, MODERNIZE = "--device cpu", "--modernize"
_HEADINGS = {
    ON_CPU: "calls that ran on the CPU instead of CUDA, in this process",
    MODERNIZE: "names and calls bridged in this process, because newer libraries lack or reject them",
}
_NOTHING = {
    ON_CPU: "no calls were redirected in this process.",
    MODERNIZE: "nothing was bridged in this process.",
}
_counts: dict[str, Counter[str]] = {option: Counter() for option in _HEADINGS}


def calling_module(depth: int = 1) -> str:
    """Return the module that called the function ``depth`` frames above the caller, past its wrappers from here."""
    frame: Any = sys._getframe(depth + 1)
    while frame.f_code in _WRAPPERS:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def is_called_by_torch(depth: int = 1) -> bool:
    """Return True if code of torch or of this package called the function ``depth`` frames above the caller."""
    return calling_module(depth + 1).startswith(("torch.", "harness.apex."))


def count(name: str, option: str = ON_CPU) -> None:
    """Count one redirection of ``name``, or one bridge with ``option=MODERNIZE``."""
    _counts[option][name] += 1


def count_call(name: str) -> None:
    """Count a call of the calling function, unless torch made it while running another function."""
    if not is_called_by_torch(depth=2):
        count(name)


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with calls counted under ``name``, unless torch makes them while running another function."""

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
    _counts[option].clear()


def print_at_exit(options: Sequence[str]) -> None:
    """Print a list for each of ``options`` to stderr when this process exits: the last output, after other ``atexit``
    functions. ``os._exit`` skips them, and processes that the script starts are not counted."""
    owner = os.getpid()

    def report() -> None:
        if os.getpid() == owner:  # not a forked child that ends with sys.exit
            print(*map(summary, options), sep="\n", file=sys.stderr, flush=True)

    atexit.register(report)


def summary(option: str = ON_CPU) -> str:
    """Return the list that ``print_at_exit`` prints for ``option``."""
    if not _counts[option]:
        return f"harness.apex {option}: {_NOTHING[option]}"
    items = sorted(_counts[option].items(), key=lambda item: (-item[1], item[0]))
    return "\n".join([f"harness.apex {option}: {_HEADINGS[option]}:", *(f"{n:10d}  {name}" for name, n in items)])
