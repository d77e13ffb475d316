"""``harness data``: download a data set into a folder, in the layout that its configuration reads."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.errors import EXIT_DONE, ConfigError

VERB = "data"
HELP = "download a data set into a folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dataset", choices=["digits", "mnist", "fashion_mnist", "pet_names"], help="data set to download"
    )
    parser.add_argument("folder", type=Path, help="folder to write it to")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="PATH_OR_URL",
        help="folder or URL with the original files (default: their published location)",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.dataset == "digits":
        from harness.data import digits

        if arguments.source is not None:
            raise ConfigError(
                "the digits come with scikit-learn and have no other source", where="--from", hint="remove --from"
            )
        print(digits.write(arguments.folder))
    else:
        from harness.data import published

        write = getattr(published, arguments.dataset)
        print(write(arguments.folder, arguments.source))
    return EXIT_DONE
