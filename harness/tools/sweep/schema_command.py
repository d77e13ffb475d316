"""``harness schema``: the JSON Schema of an experiment or a sweep. It is in the package that imports both."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.errors import EXIT_DONE

VERB = "schema"
HELP = "write the JSON Schema of the YAML files, for editors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--of", choices=["experiment", "sweep"], default="experiment", help="kind of file (default: experiment)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to FILE instead of printing")


def run(arguments: argparse.Namespace) -> int:
    from harness.runs.files import output_error, require_output, write_atomically

    if arguments.of == "sweep":
        from harness.tools.sweep import spec

        text = spec.json_schema()
    else:
        from harness.config import loader

        text = loader.json_schema()
    if arguments.out is None:
        print(text, end="")
        return EXIT_DONE
    require_output(arguments.out, ())
    try:
        write_atomically(arguments.out, text)
    except OSError as error:
        raise output_error(arguments.out, error) from None
    return EXIT_DONE
