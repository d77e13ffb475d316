"""Arguments that several verbs of the command line share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def add_config(
    parser: argparse.ArgumentParser, what: str = "a YAML file, such as configs/digits.yaml", required: bool = True
) -> None:
    """``-c CONFIG``, with ``what`` as its help, and ``key=value`` overrides: ``arguments.config`` and ``overrides``."""
    parser.add_argument("-c", "--config", required=required, metavar="CONFIG", help=what)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that override the file, such as train.epochs=3"
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """``RUN``, ``key=value`` overrides and ``--trust``, as ``arguments.folder``, ``.overrides`` and ``.trust``."""
    parser.add_argument("folder", metavar="RUN", help="a run folder, such as runs/digits, or its URL")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override those of the run, such as task.root=photos",
    )
    add_trust(parser)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """``--trust``, as ``arguments.trust``."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="trust a run that you did not start on this machine: import its code and show its images",
    )


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return an argparse type: a finite number above zero, read by ``kind`` (int or float)."""

    def number(word: str) -> float:
        value = kind(word)
        if not 0 < value < math.inf:
            raise ValueError
        return value

    number.__name__ = f"positive {kind.__name__}"  # argparse quotes this name in its error message
    return number
