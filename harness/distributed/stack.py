"""Where a thread is, or where an exception was raised, as one short phrase for reports; and the names of signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def main_thread_at() -> str:
    """Where the main thread is: the innermost function of the harness, and of all, as "step (harness/training/loop.py:97)"."""
    return whereabouts(sys._current_frames().get(threading.main_thread().ident or 0))


def raised_at(error: BaseException) -> str:
    """Where ``error`` came up, in the same words."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return whereabouts(trace.tb_frame) if trace else ""


def whereabouts(frame: FrameType | None) -> str:
    """The innermost function of the harness on the stack of ``frame``, with what it waits in."""
    innermost = frame.f_code.co_name if frame else ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and frame.f_code.co_name not in ("wait", "main_thread_at"):
            name = f"harness/{file.removeprefix(_PACKAGE)}"
            called = f", in {innermost}" if innermost != frame.f_code.co_name else ""
            return f"{frame.f_code.co_name} ({name}:{frame.f_lineno}){called}"
        frame = frame.f_back
    return innermost


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
