"""``harness init``: look at annotations, and write a configuration for them with the reasons in comments."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.errors import EXIT_DONE

HELP = "look at a CSV with annotations and write a commented configuration for it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "csv",
        nargs="*",
        metavar="CSV",
        help="the files with the training and the validation rows (default: train.csv and eval.csv in the working "
        "folder)",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="the model, such as resnet50 or, to fine-tune one of Hugging Face, hf:FOLDER_OR_NAME (default: a small "
        "one; it takes no pairs of texts)",
    )
    parser.add_argument(
        "--root",
        metavar="FOLDER",
        help="the folder that the paths of images are relative to (default: one that has them)",
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="the file to write (default: a .yaml file named after the data)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the file and print what it was derived from. Raises ConfigError, also if the file exists."""
    from harness.tools.init import first_config

    print(first_config.write(arguments.csv, arguments.out, arguments.model, arguments.root))
    return EXIT_DONE
