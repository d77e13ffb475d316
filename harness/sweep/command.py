"""``harness sweep``: train over a space of settings."""

from __future__ import annotations

import argparse

from harness.config import arguments as shared

VERB = "sweep"
HELP = "train over a space of settings; the same command resumes it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_config(parser)
    parser.add_argument("--engine", metavar="NAME", help="what starts the trials (default: launch.engine of the file)")
    parser.add_argument(
        "--parallel", type=shared.positive(int), metavar="K", help="trials at once, as far as this machine has room"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the trials without starting any")
    parser.add_argument(
        "--retry-failed", action="store_true", help="also run failed trials again, from their checkpoints"
    )


def run(arguments: argparse.Namespace) -> int:
    from harness.sweep import main

    return main.main(
        arguments.config,
        arguments.overrides,
        arguments.engine,
        arguments.parallel,
        arguments.dry_run,
        arguments.retry_failed,
    )
