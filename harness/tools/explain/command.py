"""``harness explain``: why a run is slow, and the setting to change."""

from __future__ import annotations

import argparse
import json

from harness.errors import EXIT_DONE

HELP = "find out why a run is slow, and which setting to change"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="a run folder or URL; the run may still be training")
    parser.add_argument("--json", action="store_true", help="print JSON, with the measured shares of the time")


def run(arguments: argparse.Namespace) -> int:
    from harness.runs import fetched
    from harness.runs.files import finite
    from harness.tools.explain import causes, facts

    explanation = causes.explain(facts.read(fetched.local_copy(arguments.run_folder)))
    print(json.dumps(finite(explanation.as_json()), indent=1) if arguments.json else explanation.text)
    return EXIT_DONE
