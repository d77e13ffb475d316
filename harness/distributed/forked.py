"""Start Python commands by forking this process, after it has imported what they need: that takes most of the time from
a command to its first step, and is then spent once per machine instead of once per rank.

``prepare`` imports; ``possible`` decides whether a fork does the same as a new Python. Where it would not, for example
after CUDA was used here, callers start a new Python.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from harness.distributed.launch_env import VARIABLES

_OURS = ("HARNESS_", "APEX_HARNESS_")  # variables that no library reads when it is imported
_DRIVERS = ("/dev/nvidia", "/dev/kfd")  # open once CUDA or ROCm was used, which a forked process could not use again
_HEAVY = ("torch", "numpy")  # read variables such as OMP_NUM_THREADS when they are imported
_FIRST_FD = 3


@dataclass(frozen=True)
class _Prepared:
    """The imports of this process: the variables that they may have read and that they set, and threads after them."""

    read: dict[str, str]
    set: dict[str, str]
    num_threads: int


_prepared: _Prepared | None = None


def prepare(modules: Iterable[str], environ: Mapping[str, str]) -> None:
    """Import ``modules`` with ``environ`` as the environment, so that commands which need them start by a fork. Does
    nothing if a library that reads variables was imported before, or if an import fails: a command reports that better.
    """
    global _prepared
    if _prepared is not None or not sys.platform.startswith("linux") or any(name in sys.modules for name in _HEAVY):
        return
    before = dict(os.environ)
    _set_environ(environ)
    gc.disable()  # as in ``harness train``
    try:
        for name in modules:
            importlib.import_module(name)
        gc.freeze()
        added = {name: value for name, value in os.environ.items() if environ.get(name) != value}
        _prepared = _Prepared(_read_at_import(environ), added, _num_threads())
    except Exception:
        return
    finally:
        gc.enable()
        _set_environ(before)


def possible(command: Sequence[str], environ: Mapping[str, str] | None) -> bool:
    """Whether ``command``, with the complete environment ``environ`` (None: that of this process), would do the same in
    a fork of this process."""
    environ = os.environ if environ is None else environ
    if _prepared is None or command[0] != sys.executable or command[1:2] == ["-c"]:
        return False
    same = _prepared.read == _read_at_import(environ) and _num_threads() <= _prepared.num_threads
    return same and not _uses_gpu()


class Forked:
    """A forked process, with the methods of subprocess.Popen that a supervisor needs."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str] | None,
        stdin: int | None,
        output: IO[bytes] | None,
        become: Callable[[], None],
    ) -> None:
        """``environ``, ``stdin`` as for Popen. stdout and stderr go to ``output``; None: those of this process.
        ``become`` is called first in the new process."""
        self.returncode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # The handlers of this process must not run in the new one.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which ``possible`` counts
                self.pid = os.fork()
            if self.pid == 0:
                _run(command, dict(os.environ if environ is None else environ), stdin, output, become, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self) -> int:
        code = self._ended(0)
        assert code is not None
        return code

    def _ended(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _run(
    command: Sequence[str],
    environ: dict[str, str],
    stdin: int | None,
    output: IO[bytes] | None,
    become: Callable[[], None],
    mask: Iterable[int],
) -> NoReturn:
    """In the new process: become what a new Python would be, run ``command``, and end."""
    code: Any = 1
    try:
        assert _prepared is not None
        os.setsid()
        become()
        if stdin is not None:
            os.dup2(os.open(os.devnull, os.O_RDWR) if stdin == subprocess.DEVNULL else stdin, 0)
        if output is not None:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        close_files()
        _set_environ(_prepared.set | environ)
        sys.stdout, sys.stderr = _stream(1, "strict"), _stream(2, "backslashreplace")
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _python(list(command[1:]))
        code = 0
    except SystemExit as error:
        code = error.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)


def close_files(kept: Collection[int] = ()) -> None:
    """Close all files but the standard streams and ``kept``. Only those that are open: the limit may be 10^9 in a
    container."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number >= _FIRST_FD and number not in kept:
            with suppress(OSError):  # the listing itself
                os.close(number)


def _stream(number: int, errors: str) -> Any:
    """Standard output or error as a new Python opens it; None if it is closed."""
    with suppress(OSError):
        by_line = number == 2 or os.isatty(number)
        unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
        raw = open(number, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        return io.TextIOWrapper(raw, errors=errors, line_buffering=by_line, write_through=unbuffered)
    return None


def _python(words: list[str]) -> None:
    """Do what ``python WORDS`` does, for ``-m MODULE ...`` and ``FILE ...``."""
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def _set_environ(environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


def _read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables in ``environ`` that the import of a library may have read."""
    return {name: value for name, value in environ.items() if not name.startswith(_OURS) and name not in VARIABLES}


def _num_threads() -> int:
    """Threads of libraries in this process, which a fork does not have; those that an import starts start again."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def _uses_gpu() -> bool:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return any(link.startswith(_DRIVERS) for link in links)
