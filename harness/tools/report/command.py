"""``harness report``: one file on runs or a sweep."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.config import arguments as shared
from harness.errors import EXIT_DONE

VERB = "report"
HELP = "write one page about runs or a sweep: curves, speed-up, and where the time went"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="RUN_OR_SWEEP", help="run folders, or the folder of a sweep")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="file to write (default: report.html in the first folder)"
    )
    shared.add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    from harness.runs import fetched, layout
    from harness.tools.report import page

    fetched.require_out(arguments.paths[0], arguments.out, layout.REPORT)
    paths = [fetched.local_copy(place) for place in arguments.paths]
    print(page.write(paths, arguments.out, arguments.trust))
    return EXIT_DONE
