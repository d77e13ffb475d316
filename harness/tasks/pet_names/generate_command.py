"""``harness generate``: new names from a model of the task pet_names."""

from __future__ import annotations

import argparse

from harness.config import arguments as shared
from harness.errors import EXIT_DONE

HELP = "print new names from a model trained on the task pet_names"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="a run folder, such as runs/pet_names, or its URL")
    parser.add_argument(
        "-n", dest="num", type=shared.positive(int), default=20, metavar="N", help="number of names (default: 20)"
    )
    parser.add_argument(
        "--temperature",
        type=shared.positive(float),
        default=0.8,
        metavar="T",
        help="below 1: more typical names; above 1: more unusual ones (default: 0.8)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="random seed; the same seed always gives the same names (default: 0)",
    )
    parser.add_argument("--start", default="", metavar="TEXT", help="letters that every name starts with")
    parser.add_argument("--keep-existing", action="store_true", help="also print names that are in the data")
    shared.add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    from harness.runs import fetched, trained_run

    folder = fetched.local_copy(arguments.folder)
    trained_run.configuration(folder, (), arguments.trust)  # errors come before the import of torch
    from harness.tasks.pet_names import generate

    request = generate.NameRequest(
        num=arguments.num, temperature=arguments.temperature, seed=arguments.seed, start=arguments.start,
        keep_existing=arguments.keep_existing, trust=arguments.trust,
    )  # fmt: skip
    for name in generate.names(folder, request):
        print(name, flush=True)
    return EXIT_DONE
