"""Signals that request the end of this process, by one rule for every command: the first stops it in order, the next at
once.

A thread notices signals even while the main thread is in a call of C code, where Python runs no handlers. Imports
nothing that takes time: ``install`` has to run before everything else.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType

from harness.distributed.threads import thread
from harness.errors import require_posix

require_posix()  # the names below do not exist elsewhere

REPEAT_S = 1.0  # launchers, shells and terminals may deliver one request several times within this time
TIME_LIMIT_SIGNAL = signal.SIGUSR1  # sent once by a scheduler; the default action would kill the process
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal between the first and the last one
        return f"signal {number}"


def ended_by(number: int) -> int:
    """Return the exit code of a process that a signal ended, as in shells: 130 for SIGINT, 143 for SIGTERM, and for the
    warning that a scheduler sends before it."""
    return 128 + (signal.SIGTERM if number == TIME_LIMIT_SIGNAL else number)


def end_now(number: int) -> None:
    """End this process, with the code of ``finish`` if there is one."""
    _write(f"exited immediately ({signal_name(number)})")
    os._exit(ended_by(number) if _state.code is None else _state.code)


@dataclass(frozen=True)
class Phase:
    """What signals do."""

    handle: Callable[[int], None]
    """Called for every signal, in the main thread."""
    notice: Callable[[int], None] = lambda number: None
    """Called for the first request, in the thread that notices signals."""
    again: Callable[[int], None] = end_now
    """Called for later requests, in that thread."""


def _raise_first(number: int) -> None:
    if number == TIME_LIMIT_SIGNAL or _state.raised is not None:
        return
    _state.raised = number
    raise KeyboardInterrupt


@dataclass
class _State:
    """What this process does on a signal, and which ones it has received."""

    phase: Phase = field(default_factory=lambda: Phase(_raise_first))
    old_handlers: dict[int, object] = field(default_factory=dict)
    """What ``install`` has replaced; empty without it."""
    raised: int | None = None
    warned: bool = False
    code: int | None = None
    quiet: bool = False


_state = _State()


def install(quiet: bool = False) -> None:
    """Make the first signal raise KeyboardInterrupt, and the next end the process at once, with exit code 128 + its
    number; SIGUSR1 is only remembered. For programs, in their main thread. ``quiet``: another process of the same
    command tells the user."""
    _state.quiet = quiet
    if _state.old_handlers:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _state.old_handlers = {number: signal.signal(number, _received) for number in _obeyed()}
    os.register_at_fork(after_in_child=_forget)
    thread(lambda: _watch(reader), "harness-signals").start()


def interrupted_by() -> int | None:
    """Return the signal for which KeyboardInterrupt was raised. A library may have raised an error of its own from it,
    or may have ignored it."""
    return _state.raised


def finish(code: int) -> None:
    """Decide the exit code: signals change nothing any more; a second one ends the process at once with it."""
    if _state.old_handlers:
        _state.code = code
        _state.phase = Phase(lambda number: None)


@contextmanager
def during(phase: Phase) -> Iterator[None]:
    """Let signals during the body do what ``phase`` says. A warning that came before the body is handed to
    ``phase.handle``, and so is a request that a library has ignored.

    Without ``install`` handlers are set for the body only, which call ``phase.handle`` alone. Does nothing outside the
    main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _state.phase
    _state.phase = phase
    handlers = {} if _state.old_handlers else {number: signal.signal(number, _received) for number in _obeyed()}
    try:
        if _state.warned:
            phase.handle(TIME_LIMIT_SIGNAL)
        if _state.raised is not None:
            phase.handle(_state.raised)
        yield
    finally:
        if _state.code is None:
            _state.phase = before
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def ending_the_process(doing: str) -> Iterator[None]:
    """Let the first signal during the body end the process at once: there is nothing to save, and the main thread may
    be in C code. ``doing``: for the message."""

    def end(number: int) -> None:
        if number != TIME_LIMIT_SIGNAL:
            _write(f"stopped ({signal_name(number)}) {doing}")
            os._exit(ended_by(number))

    with during(Phase(lambda number: None, notice=end)):
        yield


@dataclass
class Requests:
    """Signals to a supervising process. Only SIGINT and SIGTERM repeat a request."""

    numbers: list[int] = field(default_factory=list)
    obeyed: bool = False
    """Set as soon as the owner acts on ``numbers``. Until then a second signal ends the process at once."""

    def add(self, number: int) -> None:
        # A list: Event.set() in a handler deadlocks if the interrupted code holds its lock.
        if not self.numbers or number in (signal.SIGINT, signal.SIGTERM):
            self.numbers.append(number)


@contextmanager
def counted() -> Iterator[Requests]:
    """Collect the signals that arrive while the body runs."""
    requests = Requests()
    with during(Phase(requests.add, again=lambda number: None if requests.obeyed else end_now(number))):
        yield requests


def clear_line() -> str:
    """Return what to print before a message to standard error, so that it does not end in a progress bar of a rank."""
    return "\r\x1b[K" if sys.stderr is not None and sys.stderr.isatty() else ""


def _obeyed() -> list[signal.Signals]:
    """Return the signals to handle; under nohup SIGHUP stays ignored."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in (*_REQUESTS, TIME_LIMIT_SIGNAL) if not (ignores_hangup and number == signal.SIGHUP)]


def _received(number: int, frame: FrameType | None) -> None:
    _state.warned = _state.warned or (number == TIME_LIMIT_SIGNAL and bool(_state.old_handlers))
    _state.phase.handle(number)


def _watch(reader: int) -> None:
    """Call what the present phase has for each signal, which Python writes to ``reader``, without an end."""
    first: float | None = None
    while True:
        for number in os.read(reader, 64):  # every signal with a handler of Python, such as SIGCHLD
            now = time.monotonic()
            if number == TIME_LIMIT_SIGNAL:
                _state.phase.notice(number)
            elif number in _REQUESTS and first is None:
                first = now
                _state.phase.notice(number)
            elif number in (signal.SIGINT, signal.SIGTERM) and first is not None and now > first + REPEAT_S:
                _state.phase.again(number)


def _forget() -> None:
    """Undo ``install`` in a forked process."""
    global _state
    signal.set_wakeup_fd(-1)
    for number, handler in _state.old_handlers.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
    _state = _State(quiet=_state.quiet)


def _write(text: str) -> None:
    if not _state.quiet:
        with suppress(OSError):  # the terminal is gone
            os.write(2, f"{clear_line()}{text}\n".encode())
