"""The command line: ``driver.py``, and ``harness VERB``. Only wiring: each verb is implemented in its package's
``command.py``, in ``harness/PACKAGE/`` or a folder of it, such as ``harness/tools/NAME/``.

A command module is cheap to import (``run`` imports what it needs) and has

    VERB                    the word to type
    HELP                    one line for ``harness --help``
    add_arguments(parser)   its arguments
    run(arguments) -> int   does it and returns the exit code; raises HarnessError
    KEEPS_RUNNING           optional; True if it continues when standard output is lost
    TAKES_PROGRAM           optional; True if the words after "--" are a command that it starts: ``arguments.program``,
                            None without "--"

A package with several verbs has one ``VERB_command.py`` for each. ``harness package.module ...`` runs a command module
of your own.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import importlib.metadata
import io
import os
import platform
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from harness.config import plugins
from harness.config.arguments import find_config, unknown_option
from harness.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_STOPPED,
    EXIT_USAGE,
    ConfigError,
    HarnessError,
    exit_code_of,
    first_line,
    readable,
    similar,
    users_line,
)
from harness.version import __version__

try:
    from harness.distributed import signals
    from harness.distributed.launch_env import may_be_first
except ConfigError as unsupported:  # this operating system
    print(f"error: {unsupported}", file=sys.stderr)
    raise SystemExit(EXIT_USAGE) from None

LEAVE_S = 5.0  # after a failure, for threads and exit functions to end
LEAVE_DONE_S = 30.0  # the same after a success, when a thread may be sending results
WRITE_S = 60.0  # for a reader of standard output to make room
_output: _Raw | None = None  # standard output of a program
_BROKEN_PIPE = signals.ended_by(signal.SIGPIPE)  # as the programs of Unix


def main(argv: Sequence[str] | None = None) -> int:
    """Run the words ``argv`` (default: ``sys.argv``) of ``harness VERB`` and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].startswith(("--local-rank=", "--local_rank=")):
        words = [*words[1:], words[0]]  # torch.distributed.launch -m harness train ... puts it before the verb
    try:
        _require_working_folder()
        if "" not in sys.path:
            sys.path.append("")  # the user's own models, tasks and other parts, after all installed packages
        _require_utf8(words)
        _require_no_other_harness()
        commands = _commands(words)
        parser = _parser(words, commands)
        if not words:
            parser.print_help(sys.stderr)
            return EXIT_USAGE
        takes_program = getattr(commands.get(words[0]), "TAKES_PROGRAM", False)
        arguments = _parsed(parser, words, takes_program)
        if _output is not None:
            _output.may_be_lost = arguments.keeps_running
        code: int = arguments.run(arguments)
        signals.finish(code)
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        if signals.interrupted_by() is not None:  # as which the error began
            return _interrupted()
        if _output is not None and error is _output.lost:
            raise
        _report(error)
        return exit_code_of(error)
    return code


def _parsed(parser: argparse.ArgumentParser, words: list[str], takes_program: bool) -> argparse.Namespace:
    """Return the arguments of a command, which the words after "--" follow if it ``takes_program``."""
    own, program = words, None
    if takes_program and "--" in words:
        own, program = words[: words.index("--")], words[words.index("--") + 1 :]
    arguments, rest = parser.parse_known_args(own)
    arguments.program, arguments.words = program, words
    # argparse does not collect overrides that stand between or after the options of a sub-command.
    unknown = [word for word in rest if word.startswith("-") or not hasattr(arguments, "overrides")]
    if unknown and unknown[0].startswith("--"):
        if takes_program and program is None and len(arguments.overrides) > 1:  # perhaps an option of a command
            find_config(arguments, arguments.parser, takes_program=True)
        raise unknown_option(arguments, arguments.parser, unknown[0], words)
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.overrides += rest
    if program is None and (not takes_program or arguments.overrides):
        find_config(arguments, arguments.parser, takes_program)
    return arguments


def _report(error: Exception) -> None:
    """Print ``error``; after one that is no HarnessError, its traceback."""
    if isinstance(error, HarnessError):
        print(f"error: {error}", file=sys.stderr)
        return
    where = users_line(error) or "a fault of the harness; please report it with this traceback"
    print(f"error: {where}: {type(error).__name__}: {first_line(readable(error), '')}", file=sys.stderr)
    traceback.print_exception(error)


def _interrupted() -> int:
    number = signals.interrupted_by() or signal.SIGINT
    if may_be_first(os.environ):
        print(f"{signals.clear_line()}interrupted ({signals.signal_name(number)})", file=sys.stderr)
    return signals.ended_by(number)


def _require_utf8(words: Sequence[str]) -> None:
    """Refuse words with bytes that are not UTF-8: they could not be written to any file of a run."""
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # as which Python passes on such bytes
            raise ConfigError(f"{word!r} is not UTF-8 text", where="command line", hint="rename the file or the folder")


def _require_working_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        message = f"the working folder cannot be used: {error.strerror} (it was deleted, or moved)"
        raise ConfigError(message, hint="change to a folder that exists, such as cd ~") from None


def _require_no_other_harness() -> None:
    """Refuse a working folder with another package of this name: ``python -m harness``, which starts ranks, would find
    that one."""
    for name in ("harness/__init__.py", "harness.py"):
        other = Path(name)
        if other.is_file() and not other.samefile(Path(__file__).with_name("__init__.py")):
            raise ConfigError(
                f"this folder has another package named harness, which hides {Path(__file__).parent}",
                where=str(other.absolute()),
                hint="rename it, or run the command in another folder",
            )


def _parser(words: Sequence[str], commands: dict[str, Any]) -> argparse.ArgumentParser:
    """Return the parser of all ``commands``. Raises ConfigError for a misspelled one in ``words``."""
    if words and words[0] not in commands and (near := similar(words[0], commands)):
        raise ConfigError(f"there is no command {words[0]!r}", hint=f"did you mean harness {near}?")
    parser = _Parser(
        prog="harness",
        description="Train PyTorch models from YAML files, then compare, report, predict and export.",
        epilog="harness init writes a first configuration, harness settings early stopping searches the settings, "
        "harness VERB --help lists options, and python -c 'import harness; help(harness)' shows the Python API.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions of harness, torch and Python")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, command in sorted(commands.items()):
        verb_parser = verbs.add_parser(verb, help=command.HELP, description=command.HELP)
        command.add_arguments(verb_parser)
        keeps_running = getattr(command, "KEEPS_RUNNING", False)
        verb_parser.set_defaults(run=command.run, keeps_running=keeps_running, parser=verb_parser)
    return parser


class _Parser(argparse.ArgumentParser):
    """Names the choice that is nearest to one that does not exist."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.option_strings and action.choices is not None and value not in action.choices:
            near = similar(str(value), action.choices)
            hint = f"did you mean {near}?" if near else f"use one of {', '.join(action.choices)}"
            raise ConfigError(f"{action.option_strings[0]} cannot be {value!r}", where="command line", hint=hint)
        super()._check_value(action, value)


class _Version(argparse.Action):
    """Prints versions without importing torch, which takes seconds."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        try:
            torch = f"torch {importlib.metadata.version('torch')}"
        except importlib.metadata.PackageNotFoundError:
            torch = "torch is not installed"
        print(f"harness {__version__} ({torch}, Python {platform.python_version()})")
        parser.exit()


def _commands(words: Sequence[str]) -> dict[str, Any]:
    """Return {verb: command module} of all built-in verbs, and of the user's own verb if ``words`` starts with one."""
    here = Path(__file__).parent
    files = [file for pattern in ("*/*command.py", "*/*/*command.py") for file in here.glob(pattern)]
    names = [".".join(("harness", *file.relative_to(here).with_suffix("").parts)) for file in files]
    modules = [importlib.import_module(name) for name in names]
    found: dict[str, Any] = {module.VERB: module for module in modules}
    if words and "." in words[0] and not words[0].startswith("-"):
        found[words[0]] = plugins.import_own("verb", words[0], "harness")
    return found


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program ``harness`` and exit; ``driver.py`` is ``harness train``."""
    try:
        _open_standard_streams()
        signals.install(quiet=not may_be_first(os.environ))
        code = main(argv)
    except KeyboardInterrupt:
        code = _interrupted()
    except SystemExit as error:  # of argparse
        code = error.code if isinstance(error.code, int) else EXIT_FAILURE
    except OSError as error:
        if _output is None or error is not _output.lost:
            raise
        code = EXIT_FAILURE
    leave(code)


class _Raw(io.FileIO):
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


def _open_standard_streams() -> None:
    """Make standard error, and standard output on request, streams whose loss does not end this process.

    A closed stream becomes the null device: otherwise the next file to be opened would get its number, and the messages
    of C libraries.
    """
    global _output
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null > 2:
                os.close(null)
        if number:
            raw = _Raw(number, "w", closefd=False)
            raw.may_be_lost = number == 2
            errors = "backslashreplace" if number == 2 else getattr(old, "errors", "strict")
            by_line = number == 2 or raw.isatty()
            encoding = getattr(old, "encoding", "utf-8")
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=by_line))
            if number == 1:
                _output = raw


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
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            print(f"warning: thread {thread.name} is still running at {place}; exiting without it", file=sys.stderr)
    _end(code)


def _end(code: int) -> NoReturn:
    """Exit with ``code``, or one for standard output that was lost."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if _output is not None and _output.lost is not None:
        if not isinstance(_output.lost, BrokenPipeError):
            print(f"error: cannot write to standard output: {first_line(_output.lost)}", file=sys.stderr)
        if not _output.may_be_lost:
            code = _BROKEN_PIPE if isinstance(_output.lost, BrokenPipeError) else code or EXIT_FAILURE
    os._exit(code)


if __name__ == "__main__":
    command()
