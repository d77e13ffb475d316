"""``harness compare``: the differences between two runs, in their settings and results."""

from __future__ import annotations

import argparse
import json

from harness.config import arguments as shared
from harness.errors import EXIT_DONE

HELP = "compare the settings and results of two runs, and check whether they are bitwise equal"

EXIT_DIFFERENT = 1  # as in diff


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "one", metavar="RUN_A", help="a run folder or URL, or a folder of runs that differ only in seed"
    )
    parser.add_argument("other", metavar="RUN_B", help="the run to compare it with")
    parser.add_argument("--json", action="store_true", help="print JSON")
    shared.add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; return 0 if both runs are bitwise equal, else 1. Raises ConfigError (exit code 2) where a
    path holds no run."""
    from harness.runs import fetched, hints
    from harness.runs.files import finite

    paths = [fetched.local_copy(place, checkpoint=True) for place in (arguments.one, arguments.other)]
    hints.require_folders(paths)  # errors come before the import of torch, which takes seconds
    from harness.tools.compare import comparison

    side_a, side_b = map(comparison.side, paths)
    result = comparison.compare(side_a, side_b, arguments.trust)
    if arguments.json:
        print(json.dumps(finite(result.as_json()), indent=1, default=str))
    else:
        from harness.tools.compare import text

        print(text.render(result), end="")
    return EXIT_DONE if result.same else EXIT_DIFFERENT
