"""``harness compare``: the differences between two runs, in their settings and in their results."""

from __future__ import annotations

import argparse
import json

from harness.errors import EXIT_DONE

VERB = "compare"
HELP = "show what differs between two runs, and whether they are bitwise equal"

EXIT_DIFFERENT = 1  # as in diff


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", metavar="RUN_A", help="a run folder, its URL, or a folder of runs that differ by seed")
    parser.add_argument("other", metavar="RUN_B", help="the run to compare it with")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; return 0 if both runs are bitwise equal, else 1. Raises ConfigError (exit code 2) where a
    path holds no run."""
    from harness.compare import found, page
    from harness.runs import fetched
    from harness.runs.files import finite

    sides = (found.side(fetched.local_copy(place, checkpoint=True)) for place in (arguments.one, arguments.other))
    result = found.compare(*sides)
    if arguments.json:
        print(json.dumps(finite(found.as_plain(result)), indent=1, default=str))
    else:
        print(page.text(result), end="")
    return EXIT_DONE if result.same else EXIT_DIFFERENT
