"""``harness doctor``: check whether this machine is ready to train."""

from __future__ import annotations

import argparse
import os

HELP = "check whether this machine is ready to train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, with the list of torch.utils.collect_env")


def run(arguments: argparse.Namespace) -> int:
    from harness.tools.doctor import checks

    return checks.main(os.environ, arguments.json)
