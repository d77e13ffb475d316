"""``harness launch``: train on an engine."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, NamedTuple

from harness.config import arguments as shared
from harness.config import plugins
from harness.errors import HarnessError, LaunchError

HELP = "train on an engine, such as local, torchrun, slurm or dask"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_config(parser)
    parser.add_argument(
        "--engine", metavar="NAME", help=f"{', '.join(plugins.names('engine'))} (default: launch.engine in the file)"
    )
    parser.add_argument(
        "--nnodes", type=partial(_count, known="machines, or MIN:MAX"), metavar="N|MIN:MAX",
        help="number of machines; MIN:MAX lets machines join and leave (torchrun), or restarts with fewer (slurm)",
    )  # fmt: skip
    parser.add_argument(
        "--nproc", metavar="N|MIN:MAX|auto[:MAX]",
        type=partial(_count, known="ranks, MIN:MAX, auto or auto:MAX", may_be_auto=True),
        help="ranks per machine; MIN:MAX continues on MIN or more of MAX when ranks are lost (local); auto: one per "
        "GPU of this machine, or 2 without a GPU; auto:MAX: at most MAX (local, torchrun)",
    )  # fmt: skip
    parser.add_argument("--max-restarts", type=int, metavar="N", help="maximum number of restarts after a failure")
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, without starting it")
    parser.add_argument("--detach", action="store_true", help="submit the run (slurm, ...) without following it")


class Count(NamedTuple):
    """A number of machines or of ranks per machine, as typed."""

    most: int | None
    least: int | None = None
    auto: bool = False
    """As many as there are GPUs, and at most ``most``."""


def _count(text: str, known: str, may_be_auto: bool = False) -> Count:
    """Return ``text`` as a Count. Raises ArgumentTypeError with the forms that are ``known``."""
    word, colon, last = text.partition(":")
    positive: Any = shared.positive(int)
    try:
        if may_be_auto and word == "auto":
            return Count(positive(last) if colon else None, auto=True)
        return Count(positive(last), positive(word)) if colon else Count(positive(word))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {known}") from None


def run(arguments: argparse.Namespace) -> int:
    from harness.distributed.rank_exit import Cause, RankExit
    from harness.engines import launch
    from harness.engines.base import RANGES
    from harness.runs import exit_files

    counts: dict[str, Count] = {name: count for name in RANGES if (count := getattr(arguments, name))}
    options = {"engine": arguments.engine, "max_restarts": arguments.max_restarts}
    words = [*arguments.overrides, *(f"launch.{key}={value}" for key, value in options.items() if value is not None)]
    config: Any = None
    if any(count.auto or count.least for count in counts.values()):
        from harness.config import loader

        config = loader.load(arguments.config, words, launching=True)
    for name, count in counts.items():
        most = _fitting(config, count.most) if count.auto else count.most
        words.append(f"launch.{name}={most}")
        if count.least:
            engine, least = config.launch.engine, RANGES[name]
            if not hasattr(config.launch.engine_settings, least):
                message = f"--{name} MIN:MAX is not for engine {engine}, which has no setting {least}"
                raise LaunchError(message, hint="give one number")
            words.append(f"launch.{engine.rpartition('.')[2]}.{least}={count.least}")
    try:
        return launch.main(arguments.config, words, arguments.dry_run, arguments.detach)
    except HarnessError as error:
        exit_files.write_early(RankExit.now(None, Cause.ERROR, error.exit_code, message=str(error)))
        raise


def _fitting(config: Any, most: int | None) -> int:
    """Return the number of ranks that fit this machine."""
    engine = config.launch.engine
    if not getattr(plugins.find("engine", engine, "launch.engine"), "ON_THIS_MACHINE", False):
        message = f"--nproc auto counts the GPUs of this machine, and engine {engine} starts ranks elsewhere"
        raise LaunchError(message, hint="give one number")
    from harness.distributed import devices

    return devices.fitting_ranks(most, on_cpu=config.runtime.device == "cpu")
