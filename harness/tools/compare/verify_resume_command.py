"""``harness verify-resume``: kill a run of the user's own configuration at random moments, and compare the result."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.config import arguments as shared
from harness.config import plugins
from harness.errors import EXIT_DONE
from harness.tools.compare.command import EXIT_DIFFERENT

VERB = "verify-resume"
HELP = "kill a short run of a configuration at random moments, and check that it resumes bit for bit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_config(parser)
    parser.add_argument(
        "--kills", type=shared.positive(int), default=6, metavar="N", help="number of kills (default: 6)"
    )
    parser.add_argument(
        "--engine", metavar="NAME", help=f"{', '.join(plugins.names('engine'))} (default: launch.engine in the file)"
    )
    parser.add_argument(
        "--nproc", type=_numbers, default=[], metavar="N[,N...]",
        help="ranks per machine; several numbers, such as 1,2,4: another one for each start (parallel.logical_ranks)",
    )  # fmt: skip
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps",
        type=shared.positive(int),
        metavar="N",
        help="optimizer steps to train (default: one and a half epochs, or 24 steps if an epoch has more than 60)",
    )
    length.add_argument("--full", action="store_true", help="train the configuration without shortening it")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the kill times (default: 0)")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help="where to keep the runs (default: a temporary folder, kept if they differ)",
    )


def _numbers(text: str) -> list[int]:
    """ "1,2,4" as numbers of ranks. Raises ArgumentTypeError."""
    try:
        return [int(shared.positive(int)(word)) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, or several such as 1,2,4") from None


def run(arguments: argparse.Namespace) -> int:
    """Print the result; return 0 if the killed run resumed and equals the uninterrupted one, else 1. Raises
    HarnessError if a run fails without a kill."""
    from harness.config import loader

    engine = [f"launch.engine={arguments.engine}"] if arguments.engine else []
    overrides = [*arguments.overrides, *engine, *(f"launch.nproc={number}" for number in arguments.nproc[:1])]
    loader.load(arguments.config, overrides)  # errors come before the import of torch, which takes seconds
    from harness.tools.compare import verification

    request = verification.VerifyRequest(
        arguments.config, overrides, arguments.kills, arguments.steps, arguments.full, arguments.seed, arguments.folder,
        arguments.nproc,
    )  # fmt: skip
    return EXIT_DONE if verification.verify(request) else EXIT_DIFFERENT
