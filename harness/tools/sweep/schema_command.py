"""``harness schema``: the JSON Schema of an experiment or a sweep. It is in the package that imports both."""

from __future__ import annotations

import argparse

from harness.errors import EXIT_DONE

HELP = "print the JSON Schema of the YAML files, for editors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--of", choices=["experiment", "sweep"], default="experiment", help="kind of file (default: experiment)"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.of == "sweep":
        from harness.tools.sweep import spec

        text = spec.json_schema()
    else:
        from harness.config import json_schema

        text = json_schema.text()
    print(text, end="")
    return EXIT_DONE
