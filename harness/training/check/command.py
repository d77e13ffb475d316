"""``harness check``: print the run that a configuration plans, or every error in it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import traceback
from typing import Any

from harness.config import arguments as shared
from harness.errors import EXIT_DONE, HarnessError, OwnCodeError, without_harness

VERB = "check"
HELP = "validate a configuration: print the planned run, or every error in the file"

UNTRIED = "not tried"  # the fact that is printed last
ERROR_RECORD = ("message", "where", "hint", "exit_code")  # of an error, in the output of --json
_LIMIT_S = 20.0  # for a look for the files, for decoding some of them, and for a step on a few rows, each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_config(parser)
    parser.add_argument(
        "--world", type=shared.positive(int), default=1, metavar="N", help="number of ranks to plan for (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print the facts and the errors as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the facts and the errors; return the highest exit code of the errors."""
    facts, problems = _examine(arguments)
    untried = facts.get(UNTRIED, "")
    code = max((problem.exit_code for problem in problems), default=EXIT_DONE)
    if arguments.json:
        errors = [{key: getattr(problem, key) for key in ERROR_RECORD} for problem in problems]
        print(json.dumps({"facts": facts, "errors": errors}, default=str, ensure_ascii=False))
        return code
    for name, value in facts.items():
        if name != UNTRIED:
            print(f"{name:>15}: {value}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
        if isinstance(problem, OwnCodeError) and problem.__cause__ is not None:
            trace = without_harness(traceback.format_exception(problem.__cause__))
            print("".join(trace).rstrip(), file=sys.stderr)
    if untried:
        print(f"\n{UNTRIED}: {untried}")
    if not problems:
        start = ["train"] if arguments.world == 1 else ["launch", "--nproc", str(arguments.world)]
        words = ["harness", *start, "-c", arguments.config, *arguments.overrides]
        print(f"{'' if untried else chr(10)}no errors; to start the run: {shlex.join(words)}")
    return code


def _examine(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[HarnessError]]:
    from harness.config import loader

    try:
        loader.load(
            arguments.config, arguments.overrides, launching=True
        )  # before the import of torch, which takes seconds
    except HarnessError as error:
        if not arguments.json:
            raise
        return {}, [error]
    from harness.runs import console
    from harness.training.check import preflight

    console.show_work()
    return preflight.examine(arguments.config, arguments.overrides, arguments.world, _LIMIT_S)
