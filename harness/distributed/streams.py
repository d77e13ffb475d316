"""The standard streams of a program, which may be lost, and its exit, at which they are flushed."""

from __future__ import annotations

import atexit
import io
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

from harness.distributed import signals
from harness.errors import EXIT_DONE, EXIT_FAILURE, EXIT_STOPPED, first_line

LEAVE_S = 5.0  # after a failure, for threads and exit functions to end
LEAVE_DONE_S = 30.0  # the same after a success, when a thread may be sending results
WRITE_S = 60.0  # for a reader of standard output to make room
_BROKEN_PIPE = signals.ended_by(signal.SIGPIPE)  # as the programs of Unix


class Raw(io.FileIO):
    """Standard output or error of this process. ``may_be_lost``: writing to a terminal that was closed, a pipe without
    a reader or a full disk is not an error. Errors come after the output before them, also where both are redirected to
    one file."""

    may_be_lost = False
    lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        if self.fileno() == 2:
            with suppress(OSError, ValueError, RuntimeError):  # lost, closed, or interrupted by a signal in a write
                sys.stdout.flush()
        try:
            until = time.monotonic() + (1.0 if self.may_be_lost or self.lost else WRITE_S)
            while (written := super().write(data)) is None:  # another program has made the terminal non-blocking
                if time.monotonic() >= until:
                    raise TimeoutError("it takes no more, and nobody has read from it for too long")
                select.select([], [self], [], 0.1)
            return written
        except OSError as error:
            self.lost = error
            if not self.may_be_lost:
                raise
            return len(data)


output: Raw | None = None  # of a program


def open_all() -> None:
    """Make standard error, and standard output on request, streams whose loss does not end this process.

    A closed stream becomes the null device: otherwise the next file to be opened would get its number, and the messages
    of C libraries.
    """
    global output
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets this number, the lowest that is free
        if number:
            raw = Raw(number, "w", closefd=False)
            raw.may_be_lost = number == 2
            errors = "backslashreplace" if number == 2 else getattr(old, "errors", "strict")
            by_line = number == 2 or raw.isatty()
            encoding = getattr(old, "encoding", "utf-8")
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=by_line))
            if number == 1:
                output = raw


def lost(error: Exception) -> bool:
    """Return True if ``error`` is that of writing to standard output."""
    return output is not None and error is output.lost


def leave(code: int) -> NoReturn:
    """Exit with ``code`` like ``sys.exit``, but skip the teardown of the interpreter.

    Threads that still run after LEAVE_DONE_S, or LEAVE_S after a failure, are named and cut off.

    A signal or a library that aborts during the teardown would replace ``code``, which launchers and schedulers act on.
    With torch loaded the teardown also takes 0.3 s (medians of 6 pairs on 2 cores: 0.45 s to exit with it, 0.13 s
    without).
    """
    signals.finish(code)
    # Threads of the user, or libraries at exit, may wait without an end.
    timer = threading.Timer(LEAVE_DONE_S if code in (EXIT_DONE, EXIT_STOPPED) else LEAVE_S, _cut_off, (code,))
    timer.daemon = True
    timer.start()
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads and thread pools, as multiprocessing does
    atexit._run_exitfuncs()
    _end(code)


def _cut_off(code: int) -> NoReturn:
    """Name the threads that still run, and exit without them."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread() and (frame := frames.get(thread.ident or 0)):
            location = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            print(f"warning: thread {thread.name} is still running at {location}; exiting without it", file=sys.stderr)
    _end(code)


def _end(code: int) -> NoReturn:
    """Exit with ``code``, or one for standard output that was lost."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if output is not None and output.lost is not None:
        if not isinstance(output.lost, BrokenPipeError):
            print(f"error: cannot write to standard output: {first_line(output.lost)}", file=sys.stderr)
        if not output.may_be_lost:
            code = _BROKEN_PIPE if isinstance(output.lost, BrokenPipeError) else code or EXIT_FAILURE
    os._exit(code)
