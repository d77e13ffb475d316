"""Python commands that a process of a test forks from itself, with all that it has imported, instead of starting a new
Python, which would spend seconds of CPU time on imports."""

from __future__ import annotations

import atexit
import ctypes
import inspect
import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from harness.distributed.launch_env import Launch, environment

_OURS = ("HARNESS_", "APEX_HARNESS_")  # variables that no library reads when it is imported
_OF_LAUNCHERS = ("TORCH", "ROLE_", "GROUP_")  # set by torch's launchers; no import on a CPU reads them
_FIRST_FD = 3


_start_program = subprocess.Popen.__init__


def fork_commands(code: bool = False) -> None:
    """Let this process fork itself for each ``python -m MODULE`` or ``python FILE``, with ``code`` also for each
    ``python -c CODE``, that it starts from now on, through subprocess.Popen. Commands with other environment variables
    still start Python."""
    here, original = _read_at_import(os.environ), _shown_environ()

    def start_or_fork(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        environ = dict(options.get("env") or os.environ)
        is_list = isinstance(args, list | tuple)
        words = list(args)[1:] if is_list and args[0] == sys.executable else []
        while words and words[0] in ("-u", "-B"):  # unbuffered, and without writing .pyc
            words.pop(0)
        if words and (code or words[0] != "-c") and _read_at_import(environ) == here:
            first, kept = options.get("preexec_fn") or (lambda: None), options.get("pass_fds", ())
            options["preexec_fn"] = partial(_become, words, environ, first, kept, original)
        _start_program(self, args, *rest, **options)

    tempfile.tempdir = None  # TMPDIR may have changed
    if not code:
        inspect.stack = partial(inspect.stack, context=0)  # torch's launchers call it often, for a name only
    subprocess.Popen.__init__ = start_or_fork  # type: ignore[method-assign]


def start_commands() -> None:
    """Undo ``fork_commands``, in a process that was forked."""
    subprocess.Popen.__init__ = _start_program  # type: ignore[method-assign]


def run_python(words: Sequence[str]) -> None:
    """Do what ``python WORDS`` does, for ``-m MODULE ...``, ``FILE ...`` and ``-c CODE``."""
    try:
        if words[0] == "-c":
            sys.argv, sys.modules["__main__"] = ["-c"], ModuleType("__main__")
            exec(words[1], vars(sys.modules["__main__"]))
        elif words[0] == "-m":
            sys.argv, sys.path[0] = list(words[1:]), os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = list(words), str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # commands of the harness call them; os._exit does not


def _become(
    words: Sequence[str],
    environ: dict[str, str],
    first: Callable[[], None],
    kept: Collection[int],
    original: Mapping[str, str],
) -> NoReturn:
    """In the child of a fork, whose streams are open: be what a new Python would be, run ``words`` and end."""
    code: Any = 1
    try:
        first()
        _close_files(kept)
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders of the other process
        tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]  # its pipe is closed here
        tracker._fd = tracker._pid = None
        os.environ.clear()
        os.environ.update(environ)
        _show_environ(original)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = _stream(1, "strict"), _stream(2, "backslashreplace")
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Popen has restored the system's action, which kills
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        run_python(words)
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


def _close_files(kept: Collection[int]) -> None:
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


def _read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables in ``environ`` that the import of a library may have read."""
    others, of_rank = (*_OURS, *_OF_LAUNCHERS), environment(Launch(supervised=True))
    return {name: value for name, value in environ.items() if not name.startswith(others) and name not in of_rank}


def _shown_environ() -> dict[str, str]:
    """The variables that /proc/PID/environ shows of this process."""
    text = Path("/proc/self/environ").read_text(errors="replace")
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def _show_environ(original: Mapping[str, str]) -> None:
    """Let /proc/PID/environ show ``os.environ``: first what differs from ``original``, then what there is room for. The
    memory that the kernel reads (proc(5), env_start) holds no variable any more, since all were set again."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    entries = sorted(os.environ.items(), key=lambda item: original.get(item[0]) == item[1])
    text = "".join(f"{name}={value}\0" for name, value in entries).encode()[: end - begin]
    ctypes.memmove(begin, text[: text.rindex(0) + 1].ljust(end - begin, b"\0"), end - begin)
