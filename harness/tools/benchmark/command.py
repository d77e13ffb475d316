"""``harness bench``: measure the strategies of parallel training on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.config import arguments as shared
from harness.errors import EXIT_DONE

VERB = "bench"
HELP = "measure the parallel strategies on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count = shared.positive(int)
    parser.add_argument("what", choices=["strategies"], help="benchmark to run")
    shared.add_config(parser)
    parser.add_argument(
        "--world", type=count, nargs="+", default=[1, 2], metavar="N", help="numbers of processes (default: 1 2)"
    )
    parser.add_argument("--steps", type=count, default=40, metavar="N", help="steps per case and round (default: 40)")
    parser.add_argument("--rounds", type=count, default=3, metavar="N", help="rounds over all cases (default: 3)")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="CPU threads per process (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("bench"), metavar="DIR", help="result folder (default: bench)")


def run(arguments: argparse.Namespace) -> int:
    from harness.tools.benchmark import strategies
    from harness.training import console

    console.to_terminal(0)
    measured = strategies.strategies(
        arguments.config,
        arguments.overrides,
        arguments.world,
        arguments.steps,
        arguments.rounds,
        arguments.threads,
        arguments.out,
    )
    print(strategies.text(measured))
    return EXIT_DONE
