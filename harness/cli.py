"""The command line: ``driver.py``, and ``harness VERB``. Only wiring: each verb is implemented in its package's
``command.py``, in ``harness/PACKAGE/`` or a folder of it, such as ``harness/tools/NAME/``.

A command module is a ``Command``: ``VERB_command.py``, or ``command.py`` in a folder of this name.
``harness package.module ...`` runs a command module of your own.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import os
import platform
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from harness.config import plugins
from harness.config.arguments import find_config, unknown_option
from harness.errors import (
    EXIT_FAILURE,
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
    from harness.distributed import signals, streams
    from harness.distributed.launch_env import may_be_first
except ConfigError as unsupported:  # this operating system
    print(f"error: {unsupported}", file=sys.stderr)
    raise SystemExit(EXIT_USAGE) from None


class Command(Protocol):
    """A module that implements a verb. It is cheap to import: ``run`` imports what it needs.

    With ``KEEPS_RUNNING = True``, it continues when standard output is lost. With ``TAKES_PROGRAM = True``, the words
    after "--" are a command that it starts: ``arguments.program``, None without "--".
    """

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Return the exit code. Raises HarnessError."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the words ``argv`` (default: ``sys.argv``) of ``harness VERB`` and return the exit code."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        signals.finish(code)
        return code
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        if signals.interrupted_by() is not None:  # as which the error began
            return _interrupted()
        if streams.lost(error):
            return EXIT_FAILURE
        _report(error)
        return exit_code_of(error)


def _run(words: list[str]) -> int:
    if words and words[0].startswith(("--local-rank=", "--local_rank=")):
        words = [*words[1:], words[0]]  # torch.distributed.launch -m harness train ... puts it before the verb
    _require_working_folder()
    if "" not in sys.path:
        sys.path.append("")  # the user's own models, tasks and other parts, after all installed packages
    _require_utf8(words)
    commands = _commands(words)
    parser = _parser(words, commands)
    if not words:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    arguments = _parsed(parser, words, getattr(commands.get(words[0]), "TAKES_PROGRAM", False))
    command = commands[arguments.verb]
    if streams.output is not None:
        streams.output.may_be_lost = getattr(command, "KEEPS_RUNNING", False)
    return command.run(arguments)


def _parsed(parser: argparse.ArgumentParser, words: list[str], takes_program: bool) -> argparse.Namespace:
    """Return the arguments of a command, which the words after "--" follow if it ``takes_program``."""
    own_words, program = words, None
    if takes_program and "--" in words:
        own_words, program = words[: words.index("--")], words[words.index("--") + 1 :]
    arguments, unparsed = parser.parse_known_args(own_words)
    arguments.program, arguments.words = program, words
    # argparse does not collect overrides that stand between or after the options of a sub-command.
    unknown = [word for word in unparsed if word.startswith("-") or not hasattr(arguments, "overrides")]
    if unknown and unknown[0].startswith("--"):
        if takes_program and program is None and len(arguments.overrides) > 1:  # perhaps an option of a command
            find_config(arguments, arguments.parser, takes_program=True)
        raise unknown_option(arguments, arguments.parser, unknown[0], words)
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if unparsed:
        arguments.overrides += unparsed
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
    """Refuse a working folder that is gone, or that has another package of this name: ``python -m harness``, which
    starts ranks, would find that one."""
    try:
        os.getcwd()
    except OSError as error:
        message = f"the working folder cannot be used: {error.strerror} (it was deleted, or moved)"
        raise ConfigError(message, hint="change to a folder that exists, such as cd ~") from None
    for name in ("harness/__init__.py", "harness.py"):
        local_file = Path(name)
        if local_file.is_file() and not local_file.samefile(Path(__file__).with_name("__init__.py")):
            raise ConfigError(
                f"this folder has another package named harness, which hides {Path(__file__).parent}",
                where=str(local_file.absolute()),
                hint="rename it, or run the command in another folder",
            )


def _parser(words: Sequence[str], commands: dict[str, Command]) -> argparse.ArgumentParser:
    """Return the parser of all ``commands``. Raises ConfigError for a misspelled one in ``words``."""
    if words and words[0] not in commands and (nearest := similar(words[0], commands)):
        raise ConfigError(f"there is no command {words[0]!r}", hint=f"did you mean harness {nearest}?")
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
        verb_parser.set_defaults(parser=verb_parser)
    return parser


class _Parser(argparse.ArgumentParser):
    """Names the choice that is nearest to one that does not exist."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.option_strings and action.choices is not None and value not in action.choices:
            nearest = similar(str(value), action.choices)
            hint = f"did you mean {nearest}?" if nearest else f"use one of {', '.join(action.choices)}"
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


def _commands(words: Sequence[str]) -> dict[str, Command]:
    """Return {verb: command module} of the verb that ``words`` start with, which may be the user's own; of all built-in
    verbs if there is no such verb."""
    if words and "." in words[0] and not words[0].startswith("-"):
        return {words[0]: plugins.import_own("verb", words[0], "harness")}
    modules, package = {}, Path(__file__).parent
    for file in itertools.chain(package.glob("*/*command.py"), package.glob("*/*/*command.py")):
        verb = file.stem.removesuffix("command").rstrip("_") or file.parent.name
        modules[verb.replace("_", "-")] = ".".join(("harness", *file.relative_to(package).with_suffix("").parts))
    verbs = words[:1] if words and words[0] in modules else modules
    return {verb: cast(Command, importlib.import_module(modules[verb])) for verb in verbs}


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program ``harness`` and exit; ``driver.py`` is ``harness train``."""
    try:
        streams.open_all()
        signals.install(quiet=not may_be_first(os.environ))
        code = main(argv)
    except KeyboardInterrupt:
        code = _interrupted()
    except SystemExit as error:  # of argparse
        code = error.code if isinstance(error.code, int) else EXIT_FAILURE
    streams.leave(code)
