"""``harness launch``: train on an engine."""

from __future__ import annotations

import argparse

from harness.config import arguments as shared
from harness.config import plugins

VERB = "launch"
HELP = "train on an engine, such as local, torchrun, slurm or dask"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_config(parser)
    parser.add_argument(
        "--engine", metavar="NAME", help=f"{', '.join(plugins.names('engine'))} (default: launch.engine in the file)"
    )
    parser.add_argument(
        "--nnodes", metavar="N|MIN:MAX", help="number of machines; MIN:MAX lets machines join and leave (torchrun)"
    )
    parser.add_argument(
        "--nproc", type=_ranks, metavar="N|MIN:MAX|auto[:MAX]",
        help="ranks per machine; MIN:MAX continues on MIN or more of MAX when ranks are lost (local); auto: one per "
        "GPU of this machine, or 2 without a GPU; auto:MAX: at most MAX",
    )  # fmt: skip
    parser.add_argument("--max-restarts", type=int, metavar="N", help="maximum number of restarts after a failure")
    parser.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="address of the first machine, where all machines meet (torchrun)"
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        metavar="R",
        help="number of this machine, from 0 (default: machines are numbered in the order of their addresses)",
    )
    parser.add_argument("--scheduler", metavar="ADDRESS", help="Dask scheduler, such as tcp://10.0.0.1:8786")
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, without starting it")
    parser.add_argument("--detach", action="store_true", help="submit the run (slurm, ...) without following it")


def _ranks(text: str) -> str:
    """``text`` if it is a number of ranks, a range of it, auto or auto:MAX. Raises ArgumentTypeError."""
    word, colon, most = text.partition(":")
    try:
        for number in ([] if word == "auto" else [word]) + ([most] if colon else []):
            shared.positive(int)(number)
        return text
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, MIN:MAX, auto or auto:MAX") from None


def run(arguments: argparse.Namespace) -> int:
    from harness.engines import launch

    word, _, most = (arguments.nproc or "").partition(":")
    nproc: str | int | None = most or word or None
    if word == "auto":
        from harness.config import loader
        from harness.distributed import devices

        on_cpu = loader.load(arguments.config, arguments.overrides).runtime.device == "cpu"
        nproc = devices.fitting_ranks(int(most) if most else None, on_cpu)
    options = {
        "engine": arguments.engine,
        "nproc": nproc,
        "min_ranks": word if most and word != "auto" else None,
        "max_restarts": arguments.max_restarts,
        "rendezvous": arguments.rendezvous,
        "node_rank": arguments.node_rank,
        "dask.scheduler": arguments.scheduler,
    }
    if arguments.nnodes is not None:
        least, _, most = arguments.nnodes.rpartition(":")
        options |= {"nnodes": most, "min_nodes": least or None}
    overrides = [f"launch.{key}={value}" for key, value in options.items() if value is not None]
    return launch.main(arguments.config, [*arguments.overrides, *overrides], arguments.dry_run, arguments.detach)
