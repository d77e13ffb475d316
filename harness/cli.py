"""The command line: ``driver.py``, and ``harness VERB``. Only wiring: a verb lives in its package's ``command.py``.

A command module is cheap to import (``run`` imports what it needs) and has

    VERB                    the word to type
    HELP                    one line for ``harness --help``
    add_arguments(parser)   its arguments
    run(arguments) -> int   does it and returns the exit code; raises HarnessError

A package with several verbs has one ``VERB_command.py`` for each. ``harness package.module ...`` runs a command module
of your own.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from harness.config import plugins
from harness.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, HarnessError

LEAVE_S = 5.0  # after a failure, for threads and exit functions to end


def main(argv: Sequence[str] | None = None) -> int:
    """``harness VERB``: run the words ``argv`` (default: ``sys.argv``) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].startswith(("--local-rank=", "--local_rank=")):
        words = [*words[1:], words[0]]  # torch.distributed.launch -m harness train ... puts it before the verb
    _import_from_working_folder()
    try:
        parser = _parser(words)
        arguments, rest = parser.parse_known_args(words)
        # argparse does not collect overrides that stand between or after the options of a sub-command.
        unknown = [word for word in rest if word.startswith("-") or not hasattr(arguments, "overrides")]
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if rest:
            arguments.overrides += rest
        arguments.words = words
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return code


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harness",
        description="Train PyTorch models from a YAML file, and compare, report, predict with and export the runs.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, command in sorted(_commands(words).items()):
        verb_parser = verbs.add_parser(verb, help=command.HELP, description=command.HELP)
        command.add_arguments(verb_parser)
        verb_parser.set_defaults(run=command.run)
    return parser


def _commands(words: Sequence[str]) -> dict[str, Any]:
    """{verb: command module} of all built-in verbs, and of the user's own verb if ``words`` starts with one."""
    files = Path(__file__).parent.glob("*/*command.py")
    modules = [importlib.import_module(f"harness.{file.parent.name}.{file.stem}") for file in files]
    found: dict[str, Any] = {module.VERB: module for module in modules}
    if words and "." in words[0] and not words[0].startswith("-"):
        found[words[0]] = plugins.import_own("verb", words[0], "harness")
    return found


def drive(argv: Sequence[str]) -> int:
    """``driver.py -c CONFIG [key=value ...]``: ``harness train`` as a script that any launcher can start."""
    return main(["train", *argv])


def _import_from_working_folder() -> None:
    """Make the user's own models, tasks and other parts importable, after all installed packages."""
    if "" not in sys.path:
        sys.path.append("")


def command() -> NoReturn:
    """The program ``harness``."""
    leave(main())


def leave(code: int) -> NoReturn:
    """Exit with ``code`` like ``sys.exit``, but skip the teardown of the interpreter.

    After a failure, threads that still run are cut off after LEAVE_S.

    A signal or a library that aborts during the teardown would replace ``code``, which launchers and schedulers act on.
    With torch loaded the teardown also takes 0.3 s (medians of 6 pairs on 2 cores: 0.45 s to exit with it, 0.13 s
    without).
    """
    if code not in (EXIT_DONE, EXIT_STOPPED):  # threads of the user, or libraries at exit, may wait without an end
        timer = threading.Timer(LEAVE_S, _end, (code,))
        timer.daemon = True
        timer.start()
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads and thread pools, as multiprocessing does
    atexit._run_exitfuncs()
    _end(code)


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
