"""``harness check``: print the run that a configuration plans, or every error in it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import traceback
from typing import TYPE_CHECKING, Any

from harness.config import arguments as shared
from harness.errors import EXIT_DONE, HarnessError, OwnCodeError, without_harness

if TYPE_CHECKING:
    from harness.training.check.preflight import RunPlan

HELP = "validate a configuration: print the planned run, or every error in the file"

_UNTRIED = "not tried"
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
    from harness.config import loader

    try:  # before the import of torch, which takes seconds
        loader.load(arguments.config, arguments.overrides, launching=True)
    except HarnessError as error:
        if not arguments.json:
            raise
        _print_json({}, [error])
        return error.exit_code
    from harness.runs import console
    from harness.training.check import preflight

    console.show_work()
    plan = preflight.examine(arguments.config, arguments.overrides, arguments.world, _LIMIT_S)
    if arguments.json:
        _print_json(plan.facts | ({_UNTRIED: "; ".join(plan.untried)} if plan.untried else {}), plan.errors)
    else:
        _print(plan, arguments)
    return max((error.exit_code for error in plan.errors), default=EXIT_DONE)


def _print_json(facts: dict[str, Any], errors: list[HarnessError]) -> None:
    records = [{key: getattr(error, key) for key in ERROR_RECORD} for error in errors]
    print(json.dumps({"facts": facts, "errors": records}, default=str, ensure_ascii=False))


def _print(plan: RunPlan, arguments: argparse.Namespace) -> None:
    for name, value in plan.facts.items():
        print(f"{name:>15}: {value}")
    for error in plan.errors:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, OwnCodeError) and error.__cause__ is not None:
            trace = without_harness(traceback.format_exception(error.__cause__))
            print("".join(trace).rstrip(), file=sys.stderr)
    if plan.untried:
        print(f"\n{_UNTRIED}: {'; '.join(plan.untried)}")
    if not plan.errors:
        start = ["train"] if arguments.world == 1 else ["launch", "--nproc", str(arguments.world)]
        words = ["harness", *start, "-c", arguments.config, *arguments.overrides]
        print(f"{'' if plan.untried else chr(10)}no errors; to start the run: {shlex.join(words)}")
