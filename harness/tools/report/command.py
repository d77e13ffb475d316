"""``harness report``: one file on runs or a sweep."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness.config import arguments as shared
from harness.errors import EXIT_DONE

HELP = "write one page about runs or a sweep: curves, speed-up, and where the time went"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="RUN_OR_SWEEP", help="run folders, or the folder of a sweep")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="file to write (default: report.html in the first folder)"
    )
    form.add_argument("--json", action="store_true", help="print the state and the results of each run; write no page")
    shared.add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.json:
        return _print_records(arguments.paths)
    from harness.runs import fetched, layout
    from harness.tools.report import page

    fetched.require_out(arguments.paths[0], arguments.out, layout.REPORT)
    paths = [fetched.local_copy(place) for place in arguments.paths]
    print(page.write(paths, arguments.out, arguments.trust))
    return EXIT_DONE


def _print_records(places: list[str]) -> int:
    from harness.runs import fetched, reader
    from harness.runs.files import finite

    records = reader.find([fetched.local_copy(place) for place in places])
    print(json.dumps(finite([record.as_json() for record in records]), indent=1, default=str))
    return EXIT_DONE
