"""``harness check``: print the run that a configuration plans, or every error in it."""

from __future__ import annotations

import argparse
import shlex
import sys

from harness.config import arguments as shared
from harness.errors import EXIT_DONE

VERB = "check"
HELP = "validate a configuration: print the planned run, or every error in the file"

_LIMIT_S = 20.0  # for a look for the files, for decoding some of them, and for a step on a few rows, each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_config(parser)
    parser.add_argument(
        "--world", type=shared.positive(int), default=1, metavar="N", help="number of ranks to plan for (default: 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the facts and the errors; return the highest exit code of the errors."""
    from harness.config import loader

    loader.load(arguments.config, arguments.overrides)  # errors come before the import of torch, which takes seconds
    from harness.training import preflight

    facts, problems = preflight.examine(arguments.config, arguments.overrides, arguments.world, _LIMIT_S)
    for name, value in facts.items():
        print(f"{name:>14}: {value}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        start = ["train"] if arguments.world == 1 else ["launch", "--nproc", str(arguments.world)]
        words = ["harness", *start, "-c", arguments.config, *arguments.overrides]
        print(f"\nno errors; to start the run: {shlex.join(words)}")
    return max((problem.exit_code for problem in problems), default=EXIT_DONE)
