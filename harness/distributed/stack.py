"""Location of a thread or of a raised exception, as one short phrase."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from harness.errors import is_users

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_HELPERS = ("wait", "main_thread_at")  # frames of the wait itself, not of what the rank was doing


def main_thread_at() -> str:
    """Return the location of the main thread, such as "step (harness/training/loop.py:97) calling all_reduce"."""
    return _describe(sys._current_frames().get(threading.main_thread().ident or 0), {})


def thread_at(thread: threading.Thread) -> str:
    """Return the location of ``thread`` in the same form; empty if it has ended."""
    return _describe(sys._current_frames().get(thread.ident or 0), {})


def main_thread_lines() -> list[str]:
    """Return the stack of the main thread, as in a traceback."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return traceback.format_stack(frame) if frame else []


def raised_at(error: BaseException) -> str:
    """Return the location at which ``error`` was raised, in the same form."""
    lines = dict(traceback.walk_tb(error.__traceback__))  # a frame that caught it is at a later line by now
    return _describe(next(reversed(lines), None), lines)


def _describe(first: FrameType | None, lines: Mapping[FrameType, int]) -> str:
    """Return the innermost function of the harness on the stack of ``first``, and the innermost function of all.
    ``lines``: of frames, where it is not the current one."""
    innermost = first.f_code.co_name + _place(first, lines) if first else ""
    frame = first
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and frame.f_code.co_name not in _HELPERS:
            called = f" calling {innermost}" if frame is not first else ""
            line = lines.get(frame, frame.f_lineno)
            return f"{frame.f_code.co_name} (harness/{file.removeprefix(_PACKAGE)}:{line}){called}"
        frame = frame.f_back
    return innermost


def _place(frame: FrameType, lines: Mapping[FrameType, int]) -> str:
    """Return the file and the line of the user's code; empty for installed packages and the harness."""
    file = frame.f_code.co_filename
    return f" ({Path(file).name}:{lines.get(frame, frame.f_lineno)})" if is_users(file) else ""
