"""``harness export``: a trained model as a file that other programs load."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.config import arguments as shared
from harness.config import plugins
from harness.errors import EXIT_DONE

_KIND = "export format"
HELP = "export a trained model to a file that other programs can load"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_run(parser)
    known = ", ".join(plugins.names(_KIND))
    parser.add_argument("--format", required=True, metavar="NAME", help=f"{known}, or your own package.module")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file or folder to write (default: model.* in the run folder)"
    )


def run(arguments: argparse.Namespace) -> int:
    from harness.runs import fetched, trained_run

    plugins.require(_KIND, arguments.format, "--format")
    fetched.require_out(arguments.folder, arguments.out, "model.onnx")
    run = fetched.local_copy(arguments.folder)
    trained_run.configuration(run, arguments.overrides, arguments.trust)  # errors come before the import of torch
    from harness.inference import export
    from harness.runs import console

    console.to_terminal(0)
    print(export.export(run, arguments.format, arguments.out, arguments.overrides, arguments.trust))
    return EXIT_DONE
