"""``harness train``: one rank of a training run; ``driver.py`` is the same command as a script."""

from __future__ import annotations

import argparse
import gc
import os
from typing import TYPE_CHECKING

from harness.config import arguments as shared
from harness.distributed import signals
from harness.errors import LaunchError

if TYPE_CHECKING:
    from harness.config.schema import Config

KEEPS_RUNNING = True
HELP = "train the experiment in a YAML file, as a single process or as one rank under a launcher"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_config(parser)
    parser.add_argument("--local_rank", "--local-rank", type=int, help="set by torch.distributed.launch")


def run(arguments: argparse.Namespace) -> int:
    """Train as the rank that the environment describes; return the exit code."""
    parent = os.getppid()  # before the imports, which take seconds
    with signals.ending_the_process("before the run began; the same command starts it again"):
        return _run(arguments, parent)


def _checked_config(arguments: argparse.Namespace) -> Config | None:
    """Return the configuration. Raises the HarnessErrors of it and of the data that are found without torch, whose
    import takes seconds. None under a launcher, since ranks report errors to each other."""
    from harness.config import loader
    from harness.distributed.launch_env import detect

    try:
        if not detect(os.environ, arguments.local_rank).alone:
            return None
    except LaunchError:  # main reports it
        return None
    config = loader.load(arguments.config, arguments.overrides)
    for error in config.task.problems():
        raise loader.placed(error, config)
    return config


def _run(arguments: argparse.Namespace, parent: int) -> int:
    # The imports create half a million objects that live until the end. Collecting garbage among them takes a quarter
    # of the import time, and later a quarter of a second each time in the middle of training.
    gc.disable()
    try:
        config = _checked_config(arguments)
        from harness.training import main

        gc.freeze()
    finally:
        gc.enable()
    return main.main(arguments.config, arguments.overrides, os.environ, arguments.local_rank, parent, config)
